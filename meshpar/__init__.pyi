"""The public names for type checkers; at run time `__init__.py` imports them late."""

from meshpar import models as models
from meshpar.compiler.jit import jit as jit
from meshpar.errors import DistTensorError as DistTensorError
from meshpar.errors import MeshError as MeshError
from meshpar.errors import MeshparError as MeshparError
from meshpar.errors import PlacementError as PlacementError
from meshpar.host_devices import set_host_device_count as set_host_device_count
from meshpar.mesh import ProcessMesh as ProcessMesh
from meshpar.mesh import get_mesh as get_mesh
from meshpar.mesh import set_mesh as set_mesh
from meshpar.placements.dist_tensor import DistTensor as DistTensor
from meshpar.placements.layout import Layout as Layout
from meshpar.placements.local import dtensor_from_local as dtensor_from_local
from meshpar.placements.local import local_value as local_value
from meshpar.placements.reshard import reshard as reshard
from meshpar.placements.reshard import unshard_dtensor as unshard_dtensor
from meshpar.placements.search import reshard_steps as reshard_steps
from meshpar.placements.shard import dtensor_from_fn as dtensor_from_fn
from meshpar.placements.shard import shard_tensor as shard_tensor
from meshpar.placements.shard import show_placements as show_placements
from meshpar.placements.types import Partial as Partial
from meshpar.placements.types import Placement as Placement
from meshpar.placements.types import ReduceType as ReduceType
from meshpar.placements.types import Replicate as Replicate
from meshpar.placements.types import Shard as Shard
from meshpar.placements.values import mesh_of as mesh_of
from meshpar.placements.values import placements_of as placements_of
from meshpar.training.batch import ReplicatedBatchWarning as ReplicatedBatchWarning
from meshpar.training.checkpoint import checkpoint_contents as checkpoint_contents
from meshpar.training.checkpoint import load_state_dict as load_state_dict
from meshpar.training.checkpoint import save_state_dict as save_state_dict
from meshpar.training.create import create_sharded as create_sharded
from meshpar.training.dataloader import ShardDataloader as ShardDataloader
from meshpar.training.dataloader import shard_dataloader as shard_dataloader
from meshpar.training.dist_model import DistModel as DistModel
from meshpar.training.layers import shard_by_rules as shard_by_rules
from meshpar.training.layers import shard_layer as shard_layer
from meshpar.training.programs import RecompileWarning as RecompileWarning
from meshpar.training.stages import ShardingStage1 as ShardingStage1
from meshpar.training.stages import ShardingStage2 as ShardingStage2
from meshpar.training.stages import ShardingStage3 as ShardingStage3
from meshpar.training.stages import shard_optimizer as shard_optimizer
from meshpar.training.strategy import Strategy as Strategy
from meshpar.training.to_static import to_static as to_static

__version__: str
