import contextlib


class Metric:
    def stats(self):
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0), ("Recipes", [])]


@contextlib.contextmanager
def metric_localcontext(_name):
    yield Metric()


def metric_global(_name):
    return Metric()
