"""Selectors of PromQL."""

from kvdiag.sources.promql import any_of, selector


def test_matchers_hold_any_value() -> None:
    """Label values are matched literally: regular-expression and string characters are escaped."""
    assert r'pod=~"a\\.b|c\"d|e\\\\f|g\\|h"' == any_of("pod", ["a.b", 'c"d', "e\\f", "g|h"])
    assert r'instance=~"a\\+b(:[0-9]+)?"' == any_of("instance", ["a+b"], ending="(:[0-9]+)?")
    assert '{a="1",b="2"}' == selector('a="1"', "", 'b="2"')
