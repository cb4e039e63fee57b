"""Find the servers that leak in a day of history, and how fast their memory grows."""

import kvdiag

for history in kvdiag.read_prometheus("http://prometheus:9090", match='namespace="llm"', window="24h"):
    diagnosis = kvdiag.diagnose(history)
    print(f"{history.name}: {diagnosis.status}: {diagnosis.summary}")
    for problem in diagnosis.problems:
        print(f"  {problem.id} ({problem.status}): {problem.remedy}")
    if diagnosis.problems:
        used = history.to_pandas()["device_used_bytes"].sum(axis=1)
        by_hour = used.resample("1h").median().diff().dropna() / 2**20
        print(f"  device memory: {by_hour.median():+.0f} MiB/h over {len(by_hour)} hours")
