"""Draws the pictures of docs/rules/ with `gradclip replay`: `python docs/make_plots.py`, where gradclip[cli] is installed."""

from pathlib import Path

from gradclip.cli.app import run

FOLDER = Path(__file__).parent / "rules"
RULES = {
    "MaxNorm": "MaxNorm(1.0)",
    "UnitNorm": "UnitNorm(1.0)",
    "Median": "Median(k=2)",
    "Quantile": "Quantile(0.9, window=200)",
    "ZScore": "ZScore()",
    "ZScore-published": "ZScore.published(max_norm=None)",
    "EmaRatio": "EmaRatio()",
    "Both": "Both(MaxNorm(4.0), ZScore())",
    "Skip": "Skip(ZScore(6.0, decay=0.99))",
}


def main() -> None:
    """One picture for each rule that can be replayed, of the one log."""
    for name, rule in RULES.items():
        if run(["replay", str(FOLDER / "norms.csv"), "--rule", rule, "-o", str(FOLDER / f"{name}.png")]):
            raise SystemExit(f"{name} could not be drawn")


if __name__ == "__main__":
    main()
