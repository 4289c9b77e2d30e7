"""Starting a program as several processes, on one machine or many.

`python -m meshpar.launch script.py` (`command`) reads its options (`options`), tells each rank who
it is by environment variables (`team`), starts the ranks and watches them (`supervise`), meeting
the launchers of other machines where there are any (`party`, `meeting_place`). A rank itself begins
in `rank`. Nothing here but `doctor` loads JAX: a launcher must hold no accelerator.
`launch.command.main(argv)` runs a launcher from Python.

Elastic means here: when a rank or a node is lost, all ranks end, and the whole job starts again,
on the nodes that are left where `--nnodes LOW:HIGH` allows it; no rank is replaced while the others
run. The script goes on from its last checkpoint, which it must look for itself;
`MESHPAR_RESTART_COUNT` says how often the job has started again.
"""
