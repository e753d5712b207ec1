"""The test kit: what users test their pipelines with, and this project its own.

- `pipelines`: a whole pipeline, with Spark or without; also the points at which a runner can die
- `kernels`: one step alone, with its state in memory
- `plain_spark`: the part of Spark that a pipeline needs, in one process without a JVM
- `sink_contract`, `source_contract`, `gateway_contract`: what every sink, source and gateway
  promises, as tests to subclass
- `strikes`: processes that die at a chosen point
- `power_loss`: disks that lose power, are slow or are full, for tests of the embedded log
"""
