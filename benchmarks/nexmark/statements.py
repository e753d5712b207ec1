"""Nexmark's queries in SQL, as `Pipeline.sql` and `headrace run FILE.sql` take them. Each compiles
to the plan of the function of the same name in `queries`.

They are the benchmark's own texts with windows, bounds of joins and keys spelled as a pipeline
needs them. `side_input` is a table in a file.
"""

from __future__ import annotations

from benchmarks.nexmark.queries import _CHANNEL_ID, _HAS_CHANNEL_ID, _RANKS, _TIME_TYPE

_RANKED_COUNTS = ",\n".join(
    [
        "COUNT(*) AS total_bids",
        *(f"COUNT(*) FILTER (WHERE {is_in}) AS {rank}_bids" for rank, is_in in _RANKS.items()),
    ]
)
_DISTINCT_COUNTS = ",\n".join(
    text
    for column in ("bidder", "auction")
    for text in [
        f"COUNT(DISTINCT {column}, max_values => 10000000) AS total_{column}s",
        *(
            f"COUNT(DISTINCT {column}, max_values => 10000000) FILTER (WHERE {is_in})"
            f" AS {rank}_{column}s"
            for rank, is_in in _RANKS.items()
        ),
    ]
)


def _in_time(auction: str, bid: str) -> str:
    """Bids with their auctions, while those are open."""
    return f"""
    SELECT * FROM (SELECT id, dateTime, expires{auction} FROM auction) AS A
    JOIN (SELECT auction, price, dateTime AS bid_dateTime{bid} FROM bid) AS B
        ON A.id = B.auction AND B.bid_dateTime BETWEEN A.dateTime AND A.expires
    """


STATEMENTS: dict[str, str] = {
    "q0": "SELECT auction, bidder, price, dateTime, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, dateTime, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    "q3": """
        SELECT P.name, P.city, P.state, A.id
        FROM (SELECT id, seller, dateTime FROM auction WHERE category = 10) AS A
        JOIN (
            SELECT id AS person, name, city, state, dateTime AS since FROM person
            WHERE state IN ('OR', 'ID', 'CA')
        ) AS P
        ON A.seller = P.person AND P.since
            BETWEEN A.dateTime - INTERVAL '3650' DAY AND A.dateTime + INTERVAL '3650' DAY
    """,
    "q4": f"""
        SELECT category, AVG(final) AS final
        FROM (
            SELECT id, category, MAX(price) AS final FROM ({_in_time(", category", "")}) AS Q
            GROUP BY id, category
        ) AS F
        GROUP BY category
    """,
    "q5": """
        WITH counts AS (
            SELECT auction, window_start, window_end, COUNT(*) AS num
            FROM HOP(bid, dateTime, INTERVAL '2' SECOND, INTERVAL '10' SECOND)
            GROUP BY auction, window_start, window_end
        ), most AS (
            SELECT window_start, window_end, MAX(num) AS maxn FROM counts
            GROUP BY window_start, window_end
        )
        SELECT C.auction, C.num, C.window_start, C.window_end
        FROM counts AS C JOIN most AS M
            ON C.window_start = M.window_start AND C.window_end = M.window_end
        WHERE num >= maxn
    """,
    "q6": f"""
        WITH winning AS (
            SELECT * FROM (
                SELECT *, ROW_NUMBER() OVER (
                    PARTITION BY id ORDER BY price DESC, bid_dateTime ASC) AS rank
                FROM ({_in_time(", seller", "")}) AS Q
            ) WHERE rank <= 1
        ), newest AS (
            SELECT * EXCEPT (n) FROM (
                SELECT *, ROW_NUMBER() OVER (
                    PARTITION BY seller ORDER BY bid_dateTime DESC, id DESC) AS n
                FROM winning
            ) WHERE n <= 10
        )
        SELECT seller, AVG(price) AS avg_price FROM newest GROUP BY seller
    """,
    "q7": """
        WITH highest AS (
            SELECT window_start, window_end, MAX(price) AS maxprice
            FROM TUMBLE(bid, dateTime, INTERVAL '10' SECOND)
            GROUP BY window_start, window_end
        )
        SELECT B.auction, B.price, B.bidder, B.dateTime, B.extra
        FROM CHANGES OF highest AS M
        JOIN (SELECT auction, price, bidder, dateTime, extra FROM bid) AS B
            ON M.maxprice = B.price
            AND B.dateTime >= M.window_end - INTERVAL '10 seconds 1 microsecond'
            AND B.dateTime < M.window_end
            AND B.dateTime >= M.window_start
    """,
    "q8": """
        SELECT P.id, P.name, P.window_start AS stime, P.window_start, P.window_end
        FROM (
            SELECT id, name, window_start, window_end, COUNT(*) AS n
            FROM TUMBLE(person, dateTime, INTERVAL '10' SECOND)
            GROUP BY id, name, window_start, window_end
        ) AS P
        JOIN (
            SELECT seller, window_start, window_end, COUNT(*) AS n
            FROM TUMBLE(auction, dateTime, INTERVAL '10' SECOND)
            GROUP BY seller, window_start, window_end
        ) AS sold
        ON P.id = sold.seller AND P.window_start = sold.window_start
            AND P.window_end = sold.window_end
    """,
    "q9": f"""
        SELECT id, itemName, description, initialBid, reserve, dateTime, expires, seller, category,
            extra, auction, bidder, price, bid_dateTime, bid_extra, rank
        FROM (
            SELECT *, ROW_NUMBER() OVER (
                PARTITION BY id ORDER BY price DESC, bid_dateTime ASC) AS rank
            FROM ({
        _in_time(
            ", itemName, description, initialBid, reserve, seller, category, extra",
            ", bidder, extra AS bid_extra",
        )
    }) AS Q
        )
        WHERE rank <= 1
    """,
    "q10": """
        SELECT auction, bidder, price, dateTime, extra,
            date_format(dateTime, 'yyyy-MM-dd') AS dt, date_format(dateTime, 'HH:mm') AS hm
        FROM bid
    """,
    "q11": """
        SELECT bidder, bid_count, window_start, window_end FROM (
            SELECT bidder, window_start, window_end, COUNT(*) AS bid_count
            FROM SESSION(bid, dateTime, INTERVAL '10' SECOND)
            GROUP BY bidder, window_start, window_end
        ) AS sessions
    """,
    "q12": """
        SELECT bidder, window_start, window_end, COUNT(*) AS bid_count
        FROM TUMBLE(bid, processed_at, INTERVAL '10' SECOND)
        GROUP BY bidder, window_start, window_end
    """,
    "q13": """
        SELECT B.auction, B.bidder, B.price, B.dateTime, S.value
        FROM (SELECT auction, bidder, price, dateTime, auction % 10000 AS side_key FROM bid) AS B
        JOIN side_input AS S ON B.side_key = S.key
    """,
    "q14": f"""
        SELECT auction, bidder, 0.908 * price AS price, {_TIME_TYPE}, dateTime, extra,
            length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
    """,
    "q15": f"""
        SELECT date_format(dateTime, 'yyyy-MM-dd') AS day, {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
        FROM bid GROUP BY day
    """,
    "q16": f"""
        SELECT channel, date_format(dateTime, 'yyyy-MM-dd') AS day,
            MAX(date_format(dateTime, 'HH:mm')) AS minute, {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
        FROM bid GROUP BY channel, day
    """,
    "q17": f"""
        SELECT auction, date_format(dateTime, 'yyyy-MM-dd') AS day, {_RANKED_COUNTS},
            MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price,
            SUM(price) AS sum_price
        FROM bid GROUP BY auction, day
    """,
    "q18": """
        SELECT auction, bidder, price, channel, url, dateTime, extra FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC) AS n
            FROM bid
        ) WHERE n <= 1
    """,
    "q19": """
        SELECT * FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number
            FROM bid
        ) WHERE rank_number <= 10
    """,
    "q20": """
        SELECT auction, bidder, price, channel, url, bid_dateTime, bid_extra, itemName, description,
            initialBid, reserve, auction_dateTime, expires, seller, category, auction_extra
        FROM (
            SELECT auction, bidder, price, channel, url, dateTime AS bid_dateTime,
                extra AS bid_extra
            FROM bid
        ) AS B JOIN (
            SELECT id, itemName, description, initialBid, reserve, dateTime AS auction_dateTime,
                expires, seller, category, extra AS auction_extra
            FROM auction WHERE category = 10
        ) AS A
        ON B.auction = A.id AND A.auction_dateTime BETWEEN B.bid_dateTime - INTERVAL '3650' DAY
            AND B.bid_dateTime + INTERVAL '3650' DAY
    """,
    "q21": f"""
        SELECT auction, bidder, price, channel, {_CHANNEL_ID} FROM bid WHERE {_HAS_CHANNEL_ID}
    """,
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1,
            split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
        FROM bid
    """,
    "q23": """
        WITH known AS (
            SELECT * FROM (
                SELECT bidder, price, channel, url, dateTime AS bid_dateTime, extra AS bid_extra
                FROM bid
            ) AS B JOIN (
                SELECT id AS person_id, name, emailAddress, creditCard, city, state,
                    dateTime AS person_dateTime, extra AS person_extra
                FROM person
            ) AS P
            ON B.bidder = P.person_id AND P.person_dateTime BETWEEN
                B.bid_dateTime - INTERVAL '3650' DAY AND B.bid_dateTime + INTERVAL '3650' DAY
        )
        SELECT bidder, price, channel, url, bid_extra, person_id, name, emailAddress, creditCard,
            city, state, person_extra, itemName, description, initialBid, reserve,
            auction_dateTime, expires, seller, category, auction_extra
        FROM known AS K JOIN (
            SELECT itemName, description, initialBid, reserve, dateTime AS auction_dateTime,
                expires, seller, category, extra AS auction_extra
            FROM auction
        ) AS A
        ON K.bidder = A.seller AND A.auction_dateTime BETWEEN
            K.bid_dateTime - INTERVAL '3650' DAY AND K.bid_dateTime + INTERVAL '3650' DAY
    """,
}
"""The queries by name."""
