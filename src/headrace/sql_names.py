"""Names as standard SQL writes them: for the views' database, for captured databases and for those that sinks fill."""


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
