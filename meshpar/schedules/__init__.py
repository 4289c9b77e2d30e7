"""Pipeline schedules as data: made, checked, timed and drawn without a device."""

from meshpar.schedules.actions import Action as Action
from meshpar.schedules.actions import Costs as Costs
from meshpar.schedules.schedule import Schedule as Schedule
from meshpar.schedules.simulation import Simulation as Simulation
from meshpar.schedules.simulation import simulate as simulate
from meshpar.schedules.stages import loop_stages as loop_stages
from meshpar.schedules.stages import zigzag_stages as zigzag_stages
from meshpar.schedules.validation import ScheduleError as ScheduleError
from meshpar.schedules.validation import validate as validate
