"""The runtime: what runs a declared pipeline. In the order in which a run goes:

- `run`: a run from start to end; `Pipeline.run` and `headrace run` come here
- `declaration`: what the runtime needs of a declared pipeline
- `inputs`, `state_directory`, `arrangement`: checks at the start: topics, state, changed plans
- `runner`: cuts ticks and runs batches until it is stopped
- `query`: one batch: choose ticks, run the job, commit
- `job_builder`: from the plan to one Spark job
- `failures`: why a batch failed, and whether to try again
- `services`: captures, ingests, gateways, sinks and alerts in the background
- `status`: the status file, which `headrace status` shows
- `versions`: replaying a pipeline over the same ticks
- `explain`, `state_inspector`: what a step waits for, and what its state holds
- `erasure`: removing what a pipeline has computed from rows that must be forgotten

`plan` has the steps, `engine` what runs inside a batch, `pipeline` what users write.
"""
