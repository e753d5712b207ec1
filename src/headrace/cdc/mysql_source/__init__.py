"""MariaDB and MySQL as sources: the row binlog, read as a replica reads it. It needs the extra
`mysql`.
"""
