"""The text and the colour of each status, the same on both boards."""

from dashboards.grafana import Json
from dashboards.panels import thresholds
from dashboards.queries import CODES
from kvdiag.diagnosis.limits import PRESSURE
from kvdiag.outputs.current_verdict import STALE_SECONDS

TEXTS = {
    "ok": ("Nothing found", "green"),
    "unknown": ("Unknown", "purple"),
    "suspect": ("Suspect", "orange"),
    "fault": ("Fault", "red"),
}

MAPPINGS: list[Json] = [
    {
        "type": "value",
        "options": {
            str(CODES[status]): {"color": color, "index": CODES[status], "text": text}
            for status, (text, color) in TEXTS.items()
        },
    }
]

STEPS: Json = thresholds(
    (None, TEXTS["ok"][1]), *((CODES[status], TEXTS[status][1]) for status in ("unknown", "suspect", "fault"))
)

UP_MAPPINGS: list[Json] = [
    {
        "type": "value",
        "options": {
            "0": {"color": "red", "index": 0, "text": "Down"},
            "1": {"color": "green", "index": 1, "text": "Up"},
        },
    }
]
UP_STEPS: Json = thresholds((None, "red"), (1, "green"))

PLAIN: Json = thresholds((None, "blue"))
FULL: Json = thresholds((None, "green"), (PRESSURE.warning_ratio, "orange"), (PRESSURE.critical_ratio, "red"))
"""Of memory pressure and of requests in flight."""

ANY: Json = thresholds((None, "green"), (1, "orange"))
ANY_UNKNOWN: Json = thresholds((None, "green"), (1, TEXTS["unknown"][1]))
ANY_IS_BAD: Json = thresholds((None, "green"), (1, "red"))
TIME_LEFT: Json = thresholds((None, "red"), (6 * 3600, "orange"), (7 * 86_400, "green"))
AGE: Json = thresholds((None, "green"), (60, "orange"), (STALE_SECONDS, "red"))
ROUND_AGE: Json = thresholds((None, "green"), (3600, "orange"), (2 * 3600, "red"))
