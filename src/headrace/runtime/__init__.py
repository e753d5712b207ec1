"""What runs a plan: the runner, its queries and jobs, background services, start-up checks,
versions, status and explanations.
"""
