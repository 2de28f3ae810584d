"""The stream of prompts: the same everywhere, nothing twice in an epoch, and held-out questions nowhere in training."""

import json
import os
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_rl.rl.datasets import open_dataset
from dora_rl.rl.errors import DataError
from dora_rl.rl.rewards import exact_answer
from dora_rl.rl.tasks import RECIPES

FEW_QUESTIONS = "products_of_digits"
"""A recipe with only a hundred different questions."""


def count_words(messages) -> list[int]:
    """A tokenizer for tests: one token a word."""
    return [len(word) for turn in messages for word in turn["content"].split()]


def tasks(*names, seed=0, held_out=0, worked_examples=2, max_prompt_tokens=1000):
    return open_dataset(
        source="reasoning_gym",
        tasks=names,
        worked_examples=worked_examples,
        seed=seed,
        held_out=held_out,
        tokenize=count_words,
        max_prompt_tokens=max_prompt_tokens,
    )


def rows(path, *, source="jsonl", seed=0, held_out=0, max_prompt_tokens=1000, **columns):
    return open_dataset(
        source=source,
        path=str(path),
        seed=seed,
        held_out=held_out,
        tokenize=count_words,
        max_prompt_tokens=max_prompt_tokens,
        **columns,
    )


@pytest.fixture
def write(tmp_path):
    """Write rows (or raw lines) as a JSONL file; returns its path."""

    def written(*lines):
        path = tmp_path / "data.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return written


def question(prompt) -> str:
    return " ".join(prompt.messages[-1]["content"].split())


def epoch(dataset, number):
    return [dataset.train(number * dataset.size + place) for place in range(dataset.size)]


# Tasks


def test_a_position_names_one_prompt_on_every_machine_and_in_every_order():
    here, there = tasks("letter_counting", "gcd", seed=3), tasks("letter_counting", "gcd", seed=3)
    forwards = [here.train(position) for position in range(20)]
    backwards = [there.train(position) for position in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert forwards != [tasks("letter_counting", "gcd", seed=4).train(position) for position in range(20)]


def test_the_stream_is_the_one_that_earlier_releases_drew():
    """A changed draw would give a resumed run other prompts, and two releases other held-out questions."""
    stream = tasks("gcd", seed=0, held_out=1)
    drawn = (stream.held_out[0], stream.train(7))
    assert [(prompt.prompt_id, question(prompt)) for prompt in drawn] == [
        ("gcd-968795c972445b49", "Greatest common divisor of 26 and 8?"),
        ("gcd-35e0f4eba17b8afe", "Greatest common divisor of 28 and 14?"),
    ]


def test_every_task_has_its_turn_once_in_every_round():
    stream = tasks("letter_counting", "gcd", "letter_counting", FEW_QUESTIONS)
    for start in range(0, 40, 4):
        drawn = Counter(stream.train(position).columns["task"] for position in range(start, start + 4))
        assert drawn == {"letter_counting": 2, "gcd": 1, FEW_QUESTIONS: 1}


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), held_out=st.integers(1, 20))
def test_held_out_questions_never_occur_in_training_even_where_a_task_has_few(seed, held_out):
    stream = tasks(FEW_QUESTIONS, seed=seed, held_out=held_out)
    trained = [stream.train(position) for position in range(200)]
    assert len({question(prompt) for prompt in stream.held_out}) == held_out
    assert not {question(prompt) for prompt in trained} & {question(prompt) for prompt in stream.held_out}
    assert not {prompt.prompt_id for prompt in trained} & {prompt.prompt_id for prompt in stream.held_out}


def test_held_out_questions_are_the_same_for_every_seed():
    assert tasks("gcd", seed=1, held_out=10).held_out == tasks("gcd", seed=2, held_out=10).held_out


def test_worked_examples_are_never_asked():
    stream = tasks(FEW_QUESTIONS, held_out=8, worked_examples=3)
    asked = {question(stream.train(position)) for position in range(300)} | {question(p) for p in stream.held_out}
    shown = {turn["content"] for turn in stream.train(0).messages[:-1] if turn["role"] == "user"}
    assert len(shown) == 3
    assert not asked & shown


def test_all_prompts_of_a_task_begin_with_the_same_turns():
    stream = tasks("letter_counting", held_out=5, worked_examples=2)
    openings = {
        json.dumps(prompt.messages[:-1])
        for prompt in [*stream.held_out, *(stream.train(position) for position in range(20))]
    }
    (opening,) = (json.loads(text) for text in openings)
    assert [turn["role"] for turn in opening] == ["system", "user", "assistant", "user", "assistant"]
    assert all(
        turn["content"].split("\n")[-1].startswith("Answer: ") for turn in opening if turn["role"] == "assistant"
    )


def test_more_held_out_questions_than_a_task_has_is_an_error():
    with pytest.raises(DataError, match=f"task {FEW_QUESTIONS} has too few different questions for held_out prompts"):
        tasks(FEW_QUESTIONS, held_out=90)


def test_a_prompt_that_is_too_long_gives_its_place_to_another_and_moves_no_other():
    everything = tasks("letter_counting", seed=1)
    lengths = sorted(len(everything.train(position).token_ids) for position in range(60))
    limit = lengths[-1] - 1
    shorter = tasks("letter_counting", seed=1, max_prompt_tokens=limit)
    replaced = 0
    for position in range(60):
        before, after = everything.train(position), shorter.train(position)
        assert len(after.token_ids) <= limit
        if len(before.token_ids) <= limit:
            assert after == before
        else:
            replaced += 1
    assert 0 < replaced <= shorter.skipped


def test_a_limit_that_no_prompt_meets_is_an_error_before_the_run():
    with pytest.raises(DataError, match=r"task gcd: none of .* at most rollout.max_prompt_tokens = 3 tokens"):
        tasks("gcd", max_prompt_tokens=3)


def test_an_unknown_task_is_an_error_with_the_nearest_name():
    with pytest.raises(DataError, match="no task is called 'leter_counting'; did you mean 'letter_counting'"):
        tasks("leter_counting")


def test_a_task_that_is_not_a_function_of_its_entry_number_is_refused():
    with pytest.raises(DataError, match="time_intervals cannot be used, its questions depend on today's date"):
        tasks("time_intervals")


def test_a_task_whose_answers_need_several_lines_is_refused():
    with pytest.raises(DataError, match="answers of mini_sudoku do not fit on one line"):
        tasks("mini_sudoku")


def test_a_task_without_a_recipe_is_asked_as_it_stands():
    stream = tasks("count_bits", held_out=3, worked_examples=1)
    assert question(stream.train(0)).startswith("How many 1 bits are there in the binary representation")
    assert stream.train(0).messages[2]["content"].startswith("Answer: ")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_worked_example_earns_the_reward_that_it_shows(name):
    for problem in RECIPES[name].examples(4):
        assert exact_answer(["?"], [problem.solution], [[1]], answer=[problem.answer]) == [1.0]


@pytest.mark.parametrize("name", [name for name in sorted(RECIPES) if name.startswith(("products", "chain_sum"))])
def test_the_last_step_of_a_calculation_is_its_answer(name):
    for number in range(50):
        problem = RECIPES[name].problem(number)
        assert eval_left_to_right(problem.question.removesuffix(" = ?")) == int(problem.answer)
        if problem.work:
            assert problem.work.split("\n")[-1].endswith(f" = {problem.answer}")


def eval_left_to_right(expression: str) -> int:
    first, *rest = expression.split(" ")
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total = {"+": total + int(term), "-": total - int(term), "*": total * int(term)}[sign]
    return total


def test_no_task_at_all_is_an_error():
    with pytest.raises(DataError, match=r"data.tasks is empty"):
        tasks()


# Rows


def test_a_row_becomes_a_prompt_with_its_other_columns(write):
    path = write({"prompt": "Two and two?", "answer": 4, "level": "easy"})
    prompt = rows(path).train(0)
    assert prompt.prompt_id == "line-1"
    assert prompt.messages == ({"role": "user", "content": "Two and two?"},)
    assert prompt.columns == {"answer": 4, "level": "easy"}
    assert not prompt.is_chat
    assert prompt.token_ids == (3, 3, 4)


def test_columns_may_have_other_names_and_the_answer_may_be_missing(write):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]
    path = write({"chat": turns, "solution": "4"})
    prompt = rows(path, prompt_column="chat", answer_column="solution").train(0)
    assert prompt.messages == tuple(turns)
    assert prompt.columns == {"solution": "4", "answer": "4"}
    assert prompt.is_chat
    assert rows(path, prompt_column="chat", answer_column=None).train(0).columns == {"solution": "4"}


texts = st.lists(st.sampled_from(["a", "b b", "c  c", "c c", "d", "e e e e", " a", "f"]), min_size=1, max_size=25)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=texts, held_out=st.integers(0, 3), seed=st.integers(0, 1000))
def test_every_training_row_comes_once_an_epoch_and_no_held_out_question_ever(write, prompts, held_out, seed):
    """Equal rows are the same question, white space aside: one held-out row takes all its duplicates with it."""
    path = write(*({"prompt": text, "answer": "x"} for text in prompts))
    distinct = {" ".join(text.split()) for text in prompts}
    if len(distinct) <= held_out:
        with pytest.raises(DataError, match=r"lower eval.prompts"):
            rows(path, seed=seed, held_out=held_out)
        return
    stream = rows(path, seed=seed, held_out=held_out)
    reserved = {question(prompt) for prompt in stream.held_out}
    assert len(stream.held_out) == len(reserved) == held_out
    expected = sorted(f"line-{line}" for line, text in enumerate(prompts, 1) if " ".join(text.split()) not in reserved)
    for number in (0, 1, 5):
        assert sorted(prompt.prompt_id for prompt in epoch(stream, number)) == expected


def test_each_epoch_and_each_seed_has_its_own_order(write):
    path = write(*({"prompt": f"question {n}", "answer": n} for n in range(30)))
    stream = rows(path, seed=1)
    assert epoch(stream, 0) != epoch(stream, 1)
    assert epoch(stream, 0) == epoch(rows(path, seed=1), 0)
    assert epoch(stream, 0) != epoch(rows(path, seed=2), 0)


def test_long_prompts_are_left_out_and_counted_and_the_order_of_the_others_stays(write):
    path = write(*({"prompt": "word " * (n % 7 + 1), "answer": n} for n in range(40)))
    everything, shorter = rows(path, seed=5), rows(path, seed=5, max_prompt_tokens=4)
    for number in (0, 1):
        fitting = [prompt for prompt in epoch(everything, number) if len(prompt.token_ids) <= 4]
        assert epoch(shorter, number) == fitting
    assert shorter.skipped == everything.size - shorter.size > 0


def test_chat_prompts_are_measured_like_text(write):
    """With the whole template, not only the last turn."""
    turns = [{"role": "system", "content": "one two three"}, {"role": "user", "content": "four five"}]
    path = write({"prompt": turns, "answer": 1}, {"prompt": "six", "answer": 2})
    stream = rows(path, max_prompt_tokens=4)
    assert (stream.size, stream.skipped) == (1, 1)


GOOD = {"prompt": "Two and two?", "answer": "4"}


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ('{"prompt": ', "line 3: not valid JSON"),
        ('["prompt"]', "line 3: expected a JSON object, got list"),
        ({"question": "?", "answer": 1}, r'line 3: no column "prompt", only \[\'answer\', \'question\'\]'),
        ({"prompt": "?"}, r'line 3: no column "answer", only \[\'prompt\'\]; set data.answer_column'),
        ({"prompt": 7, "answer": 1}, 'line 3: column "prompt" must be text or a list'),
        ({"prompt": " ", "answer": 1}, 'line 3: column "prompt" must be text or a list'),
        ({"prompt": [{"role": "user"}], "answer": 1}, 'line 3: column "prompt" must be text or a list'),
        ({"prompt": [], "answer": 1}, 'line 3: column "prompt" must be text or a list'),
        ({"prompt": "?", "answer": 1, "completions": []}, 'line 3: column "completions" is a name'),
        ({"prompt": "?", "answer": " "}, 'line 3: column "answer" is empty'),
        ({"prompt": "?", "answer": None}, 'line 3: column "answer" is empty'),
        ({"prompt": "?", "answer": float("nan")}, 'line 3: column "answer" is empty'),
        (
            {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "answer": 1},
            'line 3: column "prompt" ends with an answer',
        ),
    ],
)
def test_a_bad_line_is_a_one_line_error_with_its_number(write, bad, fault):
    with pytest.raises(DataError, match=fault) as caught:
        rows(write(GOOD, "", bad, GOOD))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_names_the_line(write):
    path = write(GOOD)
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        rows(path)


def test_a_byte_order_mark_in_front_of_the_first_line_is_no_part_of_it(write):
    path = write(GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert rows(path).train(0).columns["answer"] == GOOD["answer"]


def test_a_missing_or_empty_file_is_an_error(write, tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nowhere.jsonl: No such file"):
        rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        rows(write("", ""))


def test_a_file_in_which_every_prompt_is_too_long_is_an_error(write):
    with pytest.raises(DataError, match=r"none of its 1 prompts fits rollout.max_prompt_tokens = 1; the shortest has"):
        rows(write(GOOD), max_prompt_tokens=1)


def test_a_long_prompt_can_be_refused_instead_and_is_named(write):
    path = write(GOOD, {"prompt": "one two three four", "answer": 1})
    with pytest.raises(DataError, match=r"line 2: the prompt has 4 tokens, rollout.max_prompt_tokens = 3; raise it"):
        rows(path, max_prompt_tokens=3, on_long_prompt="refuse")


# Other forms of files

VERL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "Two and two?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def test_a_parquet_file_has_the_rows_of_the_same_jsonl_and_a_dot_leads_into_a_column(write, tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL, VERL]), tmp_path / "data.parquet")
    settings = {"answer_column": "reward_model.ground_truth"}
    prompt = rows(tmp_path / "data.parquet", source="parquet", **settings).train(0)
    line = rows(write(VERL, VERL), **settings).train(0)
    assert prompt.prompt_id in ("row-1", "row-2")
    assert (prompt.messages, prompt.columns, prompt.token_ids) == (line.messages, line.columns, line.token_ids)
    assert prompt.columns["answer"] == "4"


def test_a_saved_data_set_is_read_split_by_split(tmp_path):
    folder = tmp_path / "saved"
    for split, answer in (("train", 1), ("test", 2)):
        table = pa.Table.from_pylist([{"prompt": f"{split}?", "answer": answer}])
        (folder / split).mkdir(parents=True)
        with (
            pa.OSFile(str(folder / split / "data-0.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert rows(folder, source="huggingface").train(0).columns == {"answer": 1}
    assert rows(folder, source="huggingface", split="test").train(0).columns == {"answer": 2}
    assert rows(folder / "test", source="huggingface").train(0).columns == {"answer": 2}
    with pytest.raises(DataError, match=r"has the splits \['train', 'test'\], not 'dev'; set data.split"):
        rows(folder, source="huggingface", split="dev")


def test_a_hubs_folder_of_parquet_files_is_read_by_the_names_of_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        table = pa.Table.from_pylist([{"prompt": split, "answer": split}])
        pq.write_table(table, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    assert rows(tmp_path, source="huggingface", split="test").train(0).columns == {"answer": "test"}
    with pytest.raises(DataError, match=r"no saved data set .* no dev\*.parquet"):
        rows(tmp_path, source="huggingface", split="dev")


def test_a_parquet_file_that_is_none_is_named(tmp_path):
    (tmp_path / "data.parquet").write_text("no such thing")
    with pytest.raises(DataError, match=r"data.parquet is damaged"):
        rows(tmp_path / "data.parquet", source="parquet")
    with pytest.raises(DataError, match=r"there is no .*absent.parquet"):
        rows(tmp_path / "absent.parquet", source="parquet")


def test_one_of_several_data_sets_in_a_folder_has_to_be_named(tmp_path):
    for name in ("main", "other"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"prompt": [name], "answer": ["1"]}), tmp_path / name / "train-0.parquet")
    with pytest.raises(DataError, match=r"holds several data sets, in .*main, .*other; name one"):
        rows(tmp_path, source="huggingface")
    assert rows(tmp_path / "main", source="huggingface").size == 1


def test_a_value_that_python_cannot_hold_is_named_with_its_file(tmp_path):
    table = pa.table({"prompt": ["?"], "answer": ["1"], "at": pa.array([1], pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet has a value that cannot be read: .*; leave its column out"):
        rows(tmp_path / "data.parquet", source="parquet")


def test_an_unknown_source_is_an_error():
    with pytest.raises(DataError, match=r"data.source must be"):
        open_dataset(source="csv", seed=0, held_out=0, tokenize=count_words, max_prompt_tokens=9)


RECIPES_DIGEST = """
import hashlib
from dora_rl.rl.tasks import RECIPES
problems = [(task.problem(n), task.examples(3)) for task in RECIPES.values() for n in (0, 1, 2**30)]
print(hashlib.sha256(repr(problems).encode()).hexdigest())
"""


def test_recipes_ask_the_same_in_every_process():
    def digest(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", RECIPES_DIGEST]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout

    assert digest("1") == digest("2") != ""
