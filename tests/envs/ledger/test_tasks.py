"""Generated tasks."""

from collections import Counter

from envs.ledger.tasks import Freeze, Note, Refund, Transfer, generate_task


def test_ids_are_a_letter_and_three_digits_and_differ_in_their_digits():
    for seed in range(50):
        task = generate_task(seed, 2, 20)
        ids = [c.customer_id for c in task.customers] + [a.account_id for a in task.accounts] + [p.transaction_id for p in task.purchases]
        assert all(text[0] in "CAT" and text[1:].isdigit() and text[1] != "0" and len(text) == 4 for text in ids)
        assert len({text[1:] for text in ids}) == len(ids)


def test_amounts_need_no_leading_zero_and_stand_clear_of_the_limit():
    requests = [request for seed in range(200) for request in generate_task(seed, 2, 20).requests]
    amounts = {request.amount for request in requests if isinstance(request, Transfer)}
    assert min(amounts) >= 100
    assert max(amounts) <= 999
    assert 500 not in amounts
    assert all(10 <= request.purchase.amount <= 499 for request in requests if isinstance(request, Refund))


def test_a_seed_gives_the_same_task_and_another_one_another():
    assert generate_task(3, 2, 6) == generate_task(3, 2, 6)
    assert len({generate_task(seed, 2, 6).instruction for seed in range(300)}) == 300


def test_every_kind_of_request_is_asked_for():
    kinds = Counter(type(request) for seed in range(300) for request in generate_task(seed, 2, 6).requests)
    assert min(kinds[kind] for kind in (Transfer, Refund, Freeze, Note)) > 40


def test_a_customer_quotes_ids_unless_they_are_to_be_looked_up():
    quoted, plain = generate_task(15, 4, 4), generate_task(15, 4, 4, quotes_ids=False)
    assert quoted.requests == plain.requests
    assert plain.instruction == "Help Finn Tran, born 1959-02-04: move 398 from checking to savings."
    assert quoted.instruction == "Help Finn Tran, born 1959-02-04: move 398 from checking A633 to savings A117."
