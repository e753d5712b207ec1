"""What users test their pipelines with, and we ours: `pipelines` a whole pipeline, with Spark or
without; `kernels` one step alone; `points` where a runner can be made to die; `kafka_broker` a real
broker; `crash` and `disks` a disk that loses power.
"""
