"""A leaderboard: the best players, overall and in each country, correct at every tick; also when a
player moves to another country, or is disqualified and the others move up.

Run it from anywhere: python examples/10_leaderboard.py. It creates a directory
`leaderboard-example` and can be run again. To watch it:

    headrace run examples/10_leaderboard.py
    curl -N http://127.0.0.1:8765/views/best/changes
"""

from pathlib import Path

import headrace as hr
from headrace.views.reader import ViewReader

HERE = Path("leaderboard-example")

game = hr.Pipeline("game", log=f"file:{HERE}/log")
rounds = game.topic("rounds", schema="player STRING, points BIGINT", key="player")
players = game.table("players", schema="player STRING, country STRING", key="player")

totals = rounds.group_by("player").aggregate(points=hr.agg.sum("points"), rounds=hr.agg.count())
standing = players.join(totals, on="player")  # registered players who have played
game.view("best", standing.top(3, by=["points", "player ASC"]))
game.view("best_of_country", standing.top(1, by="points", per="country"))


def show(what: str) -> None:
    game.run(state=HERE / "state", until_caught_up=True)
    with ViewReader(HERE / "state" / "views.db") as views:
        best = [
            f"{row['player']} {row['points']}"
            for row in views.sql("SELECT * FROM best ORDER BY points DESC, player").to_pylist()
        ]
        countries = {
            row["country"]: row["player"] for row in views.table("best_of_country").to_pylist()
        }
    print(f"{what}: {', '.join(best)}; best of each country: {dict(sorted(countries.items()))}")


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_topic("rounds", "player STRING, points BIGINT", key="player", exist_ok=True)
        log.create_table("players", "player STRING, country STRING", key="player", exist_ok=True)
        with (
            log.producer("rounds", id="game") as playing,
            log.producer("players", id="desk") as registering,
        ):
            known = {"ada": "uk", "ben": "uk", "cho": "kr", "dee": "kr", "eve": "uk"}
            registering.upsert(
                [{"player": player, "country": country} for player, country in known.items()],
                sequence=0,
            )
            scores = [("ada", 30), ("ben", 20), ("cho", 25), ("dee", 10), ("eve", 90), ("ada", 5)]
            playing.append(
                [{"player": player, "points": points} for player, points in scores], sequence=0
            )
            show("after the first rounds")

            registering.delete([{"player": "eve"}], sequence=1)
            registering.upsert([{"player": "ben", "country": "kr"}], sequence=2)
            playing.append([{"player": "ben", "points": 40}], sequence=1)
            show("eve is disqualified, ben moves and scores")


if __name__ == "__main__":
    main()
