"""Measurements that the README's figures come from, a script each: `python -m benchmarks.NAME`."""
