"""Training: `to_static`, `DistModel`, `Strategy`, and the sharding of optimizer state."""
