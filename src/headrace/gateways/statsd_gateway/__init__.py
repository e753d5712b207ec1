"""StatsD's protocol over UDP: packets received (`packets`), read by column (`lines`), put together each interval (`aggregating`) or handed on as they are, and appended (`gateway`)."""
