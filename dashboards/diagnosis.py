"""The board `kvdiag`: from "is it healthy" down to "which process", for the chosen replicas and GPUs."""

from dashboards import rows_details, rows_now, rows_trends
from dashboards.grafana import Board, Row
from dashboards.queries import ANNOTATIONS, GPU, VARIABLES

BOARD = Board(
    uid="kvdiag",
    title="LLM server / GPU memory (kvdiag)",
    description="Whether the GPU memory of an LLM server is healthy; if not, what is wrong and since when.",
    variables=(*VARIABLES, GPU),
    annotations=ANNOTATIONS,
    rows=(
        rows_now.health(),
        rows_now.wrong(),
        rows_now.memory(),
        rows_trends.growth(),
        rows_trends.pool(),
        rows_details.holders(),
        Row(title="GPU $gpu", panels=(rows_now.ledger_graph(24),), collapsed=True, repeat="gpu"),
        rows_details.speed(),
        rows_details.itself(),
    ),
)
