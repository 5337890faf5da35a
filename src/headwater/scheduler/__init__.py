"""One engine's step: admission, chunked prefill, preemption, budgets. Pure; native, mocker and simulator share it."""
