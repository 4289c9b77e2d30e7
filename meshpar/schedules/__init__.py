"""Pipeline schedules as data: made, checked, timed and drawn without a device.

Every schedule is a `Schedule`: a table of what each rank does in each tick. `generate` makes the
named ones, `auto` searches for the best within a memory limit, `Schedule.from_orders` takes one's
own; `validate` checks a table, `simulate` times it, `Schedule.plot` draws it.
"""

from meshpar.schedules.actions import Action as Action
from meshpar.schedules.actions import Costs as Costs
from meshpar.schedules.auto import auto as auto
from meshpar.schedules.classic import eager_1f1b as eager_1f1b
from meshpar.schedules.classic import fthenb as fthenb
from meshpar.schedules.classic import one_f_one_b as one_f_one_b
from meshpar.schedules.dualpipe import dualpipev as dualpipev
from meshpar.schedules.interleaved import interleaved_zb as interleaved_zb
from meshpar.schedules.interleaved import vpp as vpp
from meshpar.schedules.interleaved import zbh1 as zbh1
from meshpar.schedules.named import NAMES as NAMES
from meshpar.schedules.named import generate as generate
from meshpar.schedules.schedule import Schedule as Schedule
from meshpar.schedules.simulation import Simulation as Simulation
from meshpar.schedules.simulation import simulate as simulate
from meshpar.schedules.slots import Life as Life
from meshpar.schedules.slots import Slots as Slots
from meshpar.schedules.slots import allocate as allocate
from meshpar.schedules.slots import lifetimes as lifetimes
from meshpar.schedules.stages import loop_stages as loop_stages
from meshpar.schedules.stages import zigzag_stages as zigzag_stages
from meshpar.schedules.timeline import Timeline as Timeline
from meshpar.schedules.validation import ScheduleError as ScheduleError
from meshpar.schedules.validation import validate as validate
from meshpar.schedules.zigzag import zbvpp as zbvpp
