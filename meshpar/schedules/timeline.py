from meshpar.schedules.actions import Costs
class Timeline: svg=""
def timeline(schedule, costs): return Timeline()
