"""What the simulated shop is made of: its products, cities, search words, stored searches, and the words of its articles."""

from __future__ import annotations

PRODUCTS = [
    ("rope", 19.0), ("lamp", 34.5), ("boots", 129.0), ("tent", 249.0), ("stove", 59.9), ("map", 12.5), ("compass", 27.0), ("kettle", 31.0), ("gloves", 24.0),
    ("axe", 48.0), ("canoe", 799.0), ("sled", 89.0), ("hammock", 64.0), ("whistle", 6.5), ("flask", 22.0), ("scarf", 18.0), ("saddle", 310.0), ("net", 15.0),
    ("oar", 44.0), ("blanket", 39.0),
]  # fmt: skip
CITIES = {"Oslo": "no", "Bergen": "no", "Rome": "it", "Milan": "it", "Paris": "fr", "Lyon": "fr", "Lisbon": "pt", "Porto": "pt"}
RATES = {"no": 0.25, "it": 0.22, "fr": 0.2, "pt": 0.23}
CUSTOMERS = 500

# Stored searches: words with AND, OR and NOT, so that a few lines of plain Python can say who must hear of what.
QUERIES = [
    "storm AND tide", "snow OR ice", "lake AND NOT winter", "rope", "river AND canoe", "forest OR meadow", "night AND lamp AND NOT city", "summit", "harbour AND fog",
    "winter AND NOT snow", "tide OR harbour", "meadow AND river",
]  # fmt: skip
READERS = [f"reader-{number}" for number in range(len(QUERIES))]
WORDS = [
    "storm", "tide", "snow", "ice", "lake", "winter", "rope", "river", "canoe", "forest", "meadow", "night", "lamp", "city", "summit", "harbour", "fog", "morning",
    "valley", "bridge", "wind", "stone", "path", "shore", "cabin", "fire", "star", "rain", "cloud", "field",
]  # fmt: skip
