"""Spark SQL expressions: of the steps of a plan, and of the conditions and measures of patterns.
There is one parser, one type checker and one evaluator; none of them needs Spark.

From text to what Spark runs:

    expression          `parse_expression`, which the steps of a plan call
    parser              text to sqlglot's tree
    type_checker        the tree, node by node, to a typed expression; other nodes are refused
    typed_expression    an expression's type, and its forms in Spark SQL: plain, and null on failure
    type_rules          Spark's rules for types
    literals            checks of patterns, formats and other constants
    casts, arithmetic   CAST, operators
    signatures          calls by a signature; Spark itself has filled `spark_functions.txt`
    catalogue           what Spark cannot be asked: literals that are wrong, forms that give null
    refusals            why others are refused, what to use instead, what was probably meant
    functions           functions with rules of their own
    nested_values       those that make structs, maps and sequences
    time_units          those with units: timestampdiff, EXTRACT
    lambdas             those that take a lambda

From text to what Arrow computes, without Spark:

    compiler            sqlglot's tree to a typed tree
    evaluator           the typed tree, and its evaluation over Arrow columns
    spark_subset        which expressions of steps the evaluator computes exactly as Spark does

The nodes and functions form an allow-list: only what reads a single row, is deterministic and
cannot crash a worker is let through.

What patterns add to a row's columns (prev, first, last, aggregates over a match) is in
`headrace.operators.patterns.condition_parser`. The queries of `headrace.operators.search` are no
SQL: they have a syntax of their own, and an index decides which of thousands match a document.
"""
