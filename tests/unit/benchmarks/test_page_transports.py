from benchmarks.page_transports import GLOO_ALONE, GRPC_ALONE, MEMCPY, POOL_BYTES, Turn, make_table, place_behind


def turn(speed: float) -> Turn:
    return Turn(speed=speed, sender_s=1e-10, receiver_s=2e-10)


def test_shares_are_of_a_round_and_targets_where_there_are_some() -> None:
    speeds = {
        (MEMCPY, 1): (10e9, 5e9, 10e9),
        (GLOO_ALONE, 1): (1e9, 1e9, 1e9),
        (GRPC_ALONE, 1): (1e9, 1e9, 1e9),
        ("shared_memory", 1): (5e9, 4e9, 2e9),
        ("torch_distributed", 1): (0.8e9, 0.9e9, 0.7e9),
        ("grpc", 1): (0.5e9, 0.5e9, 0.5e9),
    }
    small = {(name, 1 << 20): list(map(turn, of_rounds)) for (name, _), of_rounds in speeds.items()}
    large = {(name, 8 << 20): turns for (name, _), turns in small.items()}
    rows = make_table(small | large, [1 << 20, 8 << 20]).splitlines()[2:]
    assert rows[:6] == [
        "| 1 | memcpy | 10.00 (5.00-10.00) | 100 (100-100) % |  | 100 | 200 |",
        "| 1 | gloo_alone | 1.00 (1.00-1.00) | 10 (10-20) % |  | 100 | 200 |",
        "| 1 | grpc | 0.50 (0.50-0.50) | 5 (5-10) % | 50 (50-50) %, target 80% ✗ | 100 | 200 |",
        "| 1 | grpc_alone | 1.00 (1.00-1.00) | 10 (10-20) % |  | 100 | 200 |",
        "| 1 | shared_memory | 4.00 (2.00-5.00) | 50 (20-80) % |  | 100 | 200 |",
        "| 1 | torch_distributed | 0.80 (0.70-0.90) | 8 (7-18) % | 80 (70-90) %, target 80% ✓ | 100 | 200 |",
    ]
    assert "| 8 | shared_memory | 4.00 (2.00-5.00) | 50 (20-80) %, target 70% ✗ |  | 100 | 200 |" in rows


def test_pieces_follow_one_another_and_start_over_before_the_pools_end() -> None:
    size = POOL_BYTES // 3 + 1
    assert place_behind(0, size) == size
    assert place_behind(size, size) == 0
