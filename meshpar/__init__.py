"""meshpar: an SPMD compiler frontend for JAX."""
