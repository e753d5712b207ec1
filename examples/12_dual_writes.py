"""A shop stores its products in a database and in a search index. If clients write to both, the two
diverge; if the index follows the database, they do not.

Two clients change the price of one product at the same time. Each writes to the database and then
to the index. But nothing guarantees that the index gets the two changes in the database's order,
nor that a client lives long enough to send its change to the index at all.
"""

import sqlite3
from pathlib import Path

import tantivy

import headrace as hr
from headrace.sinks.search_target import search


class HandMadeIndex:
    """A search index that clients write to directly: one document per product."""

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
    """A client of the shop; it writes to the database."""

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
    bob.write(1, "lamp for 20")  # bob writes later, and the database keeps his price
    index.put(1, "lamp for 20")
    index.put(1, "lamp for 10")  # ann's write to the index took longer
    ann.write(2, "rope for 5")  # ann's machine stops before it writes to the index
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
