"""Spark SQL expressions, checked when they are declared and without Spark: syntax, columns, types,
and what can fail on a row.

`expression.parse_expression` is what the steps of a plan call. An expression passes through these
modules:

    parser              text to sqlglot's tree
    type_checker        the tree, node by node, to a typed expression; other nodes are refused
    typed_expression    an expression's type, and its forms in Spark SQL: plain, and null on failure
    type_rules          Spark's rules for types
    literals            checks of patterns, formats and other constants
    casts, arithmetic   CAST, operators
    catalogue           the functions that are allowed, one line each
    functions           calls: by the catalogue, and functions with rules of their own
    spark_subset        which expressions can be computed over Arrow columns instead of by Spark
    evaluator           these, as trees that are evaluated over Arrow columns

The nodes and functions form an allow-list: only what reads a single row, is deterministic and
cannot crash a worker is let through.
"""
