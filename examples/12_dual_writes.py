"""A shop keeps its products in a database, and in a search index too. Writing to both by hand goes
wrong; following the database does not.

Two clients change the price of one product at the same time. Each writes to the database and then
to the index, as careful programs do; but nothing says that the index hears of the two changes in
the database's order, nor that a client lives long enough to tell it at all.
"""

import sqlite3
from pathlib import Path

import tantivy

import headrace as hr
from headrace.sinks.search_index import search


class HandMadeIndex:
    """What a program writes to directly: one document a product."""

    def __init__(self, directory: str) -> None:
        schema = (
            tantivy.SchemaBuilder()
            .add_text_field("id", stored=True, tokenizer_name="raw")
            .add_text_field("description", stored=True)
            .build()
        )
        Path(directory).mkdir()
        self.index = tantivy.Index(schema, path=directory)

    def put(self, product: int, description: str) -> None:
        writer = self.index.writer(num_threads=1)
        writer.delete_documents_by_term("id", str(product))
        writer.add_document(tantivy.Document(id=str(product), description=description))
        writer.commit()
        writer.wait_merging_threads()

    def descriptions(self) -> list[str]:
        self.index.reload()
        searcher = self.index.searcher()
        hits = searcher.search(tantivy.Query.all_query(), 10).hits
        return sorted(searcher.doc(address)["description"][0] for _, address in hits)


class Client:
    """Writes to the database; and to the index, when it gets to it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def write(self, product: int, description: str) -> None:
        with self.database:
            self.database.execute(
                "INSERT INTO products VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET description ="
                " excluded.description",
                (product, description),
            )


def in_database(database: sqlite3.Connection) -> list[str]:
    return sorted(row[0] for row in database.execute("SELECT description FROM products"))


def by_hand(database: sqlite3.Connection) -> None:
    index = HandMadeIndex("by_hand")
    ann, bob = Client(database), Client(database)
    ann.write(1, "lamp for 10")
    bob.write(1, "lamp for 20")  # bob is later, and the database knows
    index.put(1, "lamp for 20")
    index.put(1, "lamp for 10")  # ann's message took longer
    ann.write(2, "rope for 5")  # and here ann's machine stops: the index never hears of it
    print("by hand, the database has", in_database(database), "and the index", index.descriptions())


def by_following(database: sqlite3.Connection) -> None:
    capture = hr.cdc.sqlite("shop.db", tables=["products"], log="file:log")
    sink = hr.sinks.search("followed")
    ann, bob = Client(database), Client(database)
    for round_, (first, second) in enumerate([(ann, bob), (bob, ann)], 1):
        first.write(1, f"lamp for {30 * round_}")
        second.write(1, f"lamp for {40 * round_}")
        capture.run(until_caught_up=True)
        sink.run("products", log="file:log", until_caught_up=True)
        found = sorted(
            row.split('"description":"')[1].rstrip('"}')
            for _, row in search("followed", "lamp OR rope")
        )
        print(
            f"followed, round {round_}: the database has",
            in_database(database),
            "and the index",
            found,
        )
    assert sink.check("products", log="file:log").is_equal


def main() -> None:
    database = sqlite3.connect("shop.db")
    database.execute("CREATE TABLE products (id INTEGER PRIMARY KEY, description TEXT)")
    by_hand(database)
    by_following(database)
    database.close()


if __name__ == "__main__":
    main()
