"""What users test their pipelines with, and we ours."""
