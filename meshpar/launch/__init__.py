"""Starting a program as several processes, on one machine or many.

`python -m meshpar.launch script.py` (`command`) reads its options (`options`), tells each rank
who it is by environment variables (`environment`), starts the ranks and watches them
(`supervise`), meeting the launchers of other machines where there are any. A rank itself begins
in `rank`. Nothing here but `spawn` and `doctor` loads JAX: a launcher must hold no accelerator.
"""
