"""Statistics of time series: trends, jumps and random drift, with their confidence. Pure numbers.

Nothing here knows what is measured, or judges it. Series are equally spaced, oldest first, without holes; a figure
that cannot be computed is `None`. Times are seconds of any origin: adding a constant to them changes nothing.
"""

from kvdiag.stats.jumps import Levelled, is_step, sensitivities, without_jumps
from kvdiag.stats.series import (
    Interval,
    bin_ends,
    binned,
    deviation,
    evenly,
    exhaustion_seconds,
    interpolated,
    quantile,
    theil_sen,
)
from kvdiag.stats.slopes import Slope, clear_rate, drift_tail, slope, slope_error
from kvdiag.stats.tails import binomial_tail, student_tail
