from loong.core.errors import ClusterError, EngineStoppedError


def test_clients_of_an_engine_that_has_stopped_are_advised_to_try_again() -> None:
    error = EngineStoppedError()
    assert isinstance(error, ClusterError)
    assert str(error).endswith("try again later")
