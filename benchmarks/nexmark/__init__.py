"""Nexmark: auctions on the web, and the questions that stream processors are compared by.

`events` makes persons, auctions and bids after the benchmark's definition; `queries` has one
function a query on `hr.Pipeline`, with what it means in SQL, and `pattern_queries` those of
patterns; `oracle` answers the SQL with DuckDB and says whether ours is the same; `flink` runs Flink
SQL over the same rows. `bench_nexmark` measures them.
"""
