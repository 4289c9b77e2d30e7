"""What the plan lists is what the lowered module holds: kinds, axes and bytes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.hlo_counts import axes_of, collectives_in_stablehlo, sent_bytes

KINDS = {"collective_permute": "ppermute"}
