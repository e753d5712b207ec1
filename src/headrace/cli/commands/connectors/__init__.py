"""Commands that connect a log with the outside: captures, sinks, gateways, alerts, watches."""
