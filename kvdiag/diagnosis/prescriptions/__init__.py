"""The fix of a verdict, computed for this server: which flag to set to what, what it buys and what it costs. Pure.

Each function answers one question of the rules: how a pool holds more requests or a longer one (`pool_room`), how more
of the device stays free (`device_room`). The figures are those of the running server, and the changes are found by
`kvdiag.kv.fit.scenario`, as for `kvdiag fit`. Order of least harm: settings before hardware, those that end the finding
before those that make it smaller, and then by what they cost those who send requests. A change that the engine has no
flag for is left out; one that cannot be computed is among `missing`, with how to get its figure.
"""
