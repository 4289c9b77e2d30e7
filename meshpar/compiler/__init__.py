"""From a jaxpr and a few placements to a program with explicit collectives.

`program` is the IR, `trace` makes it, `options` and `decide` choose layouts for one operation,
`propagate` for all of them, `plan` shows the choice, `partition` emits the local program.
"""
