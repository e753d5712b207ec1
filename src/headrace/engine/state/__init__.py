"""The state of a pipeline's steps.

- `files`: immutable state files, per step and key group. They are the truth.
- `local_store`: a key-value store (LMDB) on each shard's local disk. It is a cache of the files.
- `step_state`: what a kernel reads and writes during a batch, and how its changes become files.
- `folding_schedule`: when to fold and merge the chains of state files that deltas make.
- `sweeper`: removes files that no ledger entry refers to.

`engine.shard` uses all of them in a batch; `engine.ledger` stores the ids of the files;
`runtime.state_inspector` shows state to people.
"""
