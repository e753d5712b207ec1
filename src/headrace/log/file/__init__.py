"""The embedded log: a directory, no server, safe for several processes at once.

The modules, in the order in which a record passes them:

- `log`: `FileLog`, the public interface; `handle`: the parts that its clients share
- `producer`: checks, partitions and encodes rows; idempotence
- `transaction`, `staging`: rows of several topics that are committed at once, and files that wait
  for a commit
- `commit_draft`: what one commit will do; `committer`: group commit
- `journal`: the commit journal and the durable marker
- `segment`: frames, segments and their indexes
- `state`: the log's state, as the journal's operations produce it
- `store`: the directory, its lock, and a process's replicas of the state
- `reader`: from offsets to segments to Arrow batches
- `consumer`: consumer groups; `queue`: messages with leases; `liveness`: who is alive
- `checkpoint`: the state on disk, and replicas built from it
- `recovery`: repair after power loss
- `maintenance`: checkpoints, retention and verification, in the background and on request
- `compaction`: the newest row of each key
- `backup`: copies as of one commit, and copies that are not
- `disk`: the file layer; tests replace it to inject faults

The interface is `headrace.log.api`; the Kafka backend is `headrace.log.kafka`.
"""
