import re
from dataclasses import fields
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.workloads.data_file import DataFile
from loong.workloads.distributions.arrivals import Arrivals, Closed, Paced, ReplayedArrivals
from loong.workloads.distributions.documents import LEval
from loong.workloads.distributions.laws import Beta, Fixed, Law, LogNormal, Uniform, Zipf
from loong.workloads.distributions.mix import Mix, Single
from loong.workloads.distributions.shared_prefix import SharedPrefix
from loong.workloads.distributions.system_prompts import MMLULike, SystemPrompt
from loong.workloads.named import NAMES, Named
from loong.workloads.spec import AnySource, Workload, parse_workload

above_0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
ranges = st.lists(st.integers(1, 10_000_000), min_size=2, max_size=2).map(sorted)
outputs = st.none() | st.integers(1, 10_000_000)


@st.composite
def laws(draw: st.DrawFn) -> Law:
    (low, high), output = draw(ranges), draw(outputs)
    fraction = draw(st.floats(0.01, 0.99))
    choices = [
        Fixed(low, output=output),
        Uniform(low, high, output=output),
        LogNormal((low + high) / 2, draw(st.floats(0.01, 3)), low, high, output=output)
        if high >= 2 * low
        else Zipf(draw(st.floats(0, 10)), low, high, output=output),
    ]
    if high > low:
        mean = low + fraction * (high - low)
        choices.append(Beta(low, high, mean, ((mean - low) * (high - mean)) ** 0.5 / 2, output=output))
    return draw(st.sampled_from(choices))


singles: st.SearchStrategy[Single] = (
    st.sampled_from(NAMES).map(Named)
    | laws()
    | st.integers(1, 1_000).map(LEval)
    | (st.none() | st.integers(1, 32_768)).map(SharedPrefix)
    | st.text(min_size=1).filter(lambda path: "'" not in path and "\n" not in path).map(DataFile)
)
mixes = st.lists(st.tuples(above_0, singles), min_size=2, max_size=4).map(lambda parts: Mix(tuple(parts)))
arrivals: st.SearchStrategy[Arrivals] = (
    st.builds(Paced, above_0 | st.just(inf), above_0 | st.sampled_from([1.0, inf]))
    | st.integers(1, 1000).map(Closed)
    | above_0.map(ReplayedArrivals)
)


@given(source=singles | mixes, when=st.none() | arrivals)
def test_what_a_workload_prints_reads_back_as_itself(source: AnySource, when: Arrivals | None) -> None:
    assume(not isinstance(when, ReplayedArrivals) or isinstance(source, DataFile))
    workload = Workload(source, when)
    assert parse_workload(str(workload)) == workload


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("mixed", Workload(Named("mixed"))),
        ("zipf1.2", Workload(Named("zipf1.2"))),
        ("zipf(1.2,10,200000)@poisson(2.5)", Workload(Zipf(1.2, 10, 200_000), Paced(2.5))),
        ("sharegpt@gamma(4,0.5)", Workload(Named("sharegpt"), Paced(4, 0.5))),
        ("sharegpt@constant(4)", Workload(Named("sharegpt"), Paced(4, inf))),
        ("fixed(1000,500)@closed(64)", Workload(Fixed(1000, output=500), Closed(64))),
        (
            "0.7*sharegpt+3e-1*lveval@poisson(1)",
            Workload(Mix(((0.7, Named("sharegpt")), (0.3, Named("lveval")))), Paced(1)),
        ),
        (
            "sharegpt+lveval",
            Workload(Mix(((1.0, Named("sharegpt")), (1.0, Named("lveval"))))),
        ),
        ("2*sharegpt", Workload(Named("sharegpt"))),
        ("shared-prefix", Workload(SharedPrefix())),
        ("system-prompt(64)", Workload(SystemPrompt(64))),
        ("system-prompt(64,128,256)", Workload(SystemPrompt(64, 128, 256))),
        ("mmlu-like", Workload(MMLULike())),
        ("mmlu-like(1)", Workload(MMLULike(1))),
        ("shared-prefix(2048)", Workload(SharedPrefix(2048))),
        ("leval", Workload(LEval())),
        ("leval(4)", Workload(LEval(4))),
        ("agents@poisson(2)", Workload(Named("agents"), Paced(2))),
        ("trace:a/b-1.csv", Workload(DataFile("a/b-1.csv"))),
        ("trace:a.csv@replay(2)", Workload(DataFile("a.csv"), ReplayedArrivals(2))),
        ("trace:a.csv@replay", Workload(DataFile("a.csv"), ReplayedArrivals(1))),
        ("trace:a.csv,speedup=2", Workload(DataFile("a.csv"), ReplayedArrivals(2))),
        ("trace:'my file@2.csv'@poisson(inf)", Workload(DataFile("my file@2.csv"), Paced(inf))),
    ],
)
def test_specs_mean_what_they_say(text: str, workload: Workload) -> None:
    assert parse_workload(text) == workload


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "workload '', character 1 (the end): a workload is missing; choose from sharegpt, "),
        ("zipff(1)", "character 1 ('z'): 'zipff' is no workload; choose from sharegpt, "),
        ("zipff(1)", ", trace:FILE; did you mean zipf?"),
        ("0.3*leva", ", trace:FILE; did you mean leval?"),
        ("tracer:a.csv", ", trace:FILE; did you mean trace:?"),
        ("mixed(3)", "character 6 ('('): +, @ or the end is expected"),
        ("zipf(1.2,10", "character 12 (the end): a comma or a closing parenthesis is expected"),
        ("zipf(1.2,,10)", "character 10 (','): a number is expected"),
        ("zipf(1)", "character 1 ('z'): zipf(ALPHA,LOW,HIGH[,OUTPUT]) needs 3 or 4 numbers, but has 1"),
        ("zipf(1.2,20,10)", "character 1 ('z'): LOW 20 is above HIGH 10"),
        ("zipf(11,1,10)", "ALPHA 11 is not from 0 to 10"),
        ("fixed(1.5)", "INPUT 1.5 is no whole number"),
        ("fixed(inf)", "INPUT inf is no whole number"),
        ("fixed(0)", "INPUT 0 is not from 1 to 10000000 tokens"),
        ("fixed(9,0)", "OUTPUT 0 is not from 1 to 10000000 tokens"),
        ("lognormal(0,1,1,9)", "MEDIAN 0 is not above 0"),
        ("lognormal(9,1,100000,100001)", "of a log-normal of MEDIAN 9 and SIGMA 1, less than 1%"),
        ("beta(1,10,10,1)", "MEAN 10 is not between LOW 1 and HIGH 10"),
        ("beta(1,10,5,9)", "SD 9 is not from 0.004472 to 4.468, which this range and mean allow"),
        ("system-prompt(64,128)", "system-prompt has INPUT 128, and needs OUTPUT as well"),
        ("mmlu-like(6)", "SHOTS 6 is not from 0 to 5"),
        ("shared-prefix(40000)", "PREFIX 40000 is not from 1 to 32768 tokens"),
        ("leval(0)", "QUESTIONS 0 is not from 1 to 1000 a document"),
        ("leval(1.5)", "QUESTIONS 1.5 is no whole number"),
        ("agents(3)", "character 7 ('('): +, @ or the end is expected"),
        ("shared-prefix(1,2)", "shared-prefix[(PREFIX)] needs 0 or 1 number, but has 2"),
        ("sharegpt+", "character 10 (the end): a workload is missing; choose from sharegpt, "),
        ("0*sharegpt", "character 1 ('0'): the weight 0 is not above 0"),
        ("2sharegpt", "character 2 ('s'): * is expected after the weight 2"),
        ("sharegpt@", "character 10 (the end): a way to arrive is missing; choose from poisson(RATE), "),
        ("sharegpt@poison(2)", "character 10 ('p'): 'poison' is no way to arrive"),
        ("sharegpt@poison(2)", ", replay(SPEEDUP); did you mean poisson?"),
        ("sharegpt@poisson", "character 10 ('p'): poisson(RATE) needs 1 number, but has 0"),
        ("sharegpt@gamma(1)", "gamma(RATE,BURSTINESS) needs 2 numbers, but has 1"),
        ("trace:a@replay(1,2)", "replay(SPEEDUP) needs 0 or 1 number, but has 2"),
        ("sharegpt@poisson(0)", "character 10 ('p'): a rate of 0 is not above 0"),
        ("sharegpt@gamma(1,-1)", "a burstiness of -1 is not above 0"),
        ("sharegpt@closed(0)", "a concurrency of 0 is not at least 1"),
        ("sharegpt@closed(2.5)", "CONCURRENCY 2.5 is no whole number"),
        ("sharegpt@poisson(2) ", "character 20 (' '): the end is expected"),
        ("mixed@replay(2)", "mixed has no times to replay; only one trace:FILE alone can have them"),
        ("trace:", "character 7 (the end): a path is expected"),
        ("trace:''", "character 7 (\"'\"): a path is expected, in '' if it has"),
        ("trace:a,speedup=", "character 17 (the end): a number is expected"),
        ("trace:a,speedup=0", "character 8 (','): a speed-up of 0 is not above 0"),
        ("trace:a,speedup=2@poisson(1)", "character 18 ('@'): the end is expected"),
    ],
)
def test_errors_say_what_is_wrong_and_where_and_what_is_allowed(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as error:
        parse_workload(text)
    assert "\n" not in str(error.value)


def test_a_laws_numbers_are_in_the_order_of_its_fields() -> None:
    law = Beta(1, 60_000, 1_233, 4_000, output=7)
    assert {field.name for field in fields(law)} == {"low", "high", "mean", "sd", "output"}
    assert str(law) == "beta(1,60000,1233,4000,7)"
