use super::*;

fn mistake(line: &str) -> String {
    let arguments = line.split(' ').map(Into::into);
    match parse(arguments) {
        Err(Refused::Mistake(said)) => said,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn limits_of_a_stager_may_be_nothing_and_slots_not() {
    for (text, bytes) in [("0", Ok(0)), ("16K", Ok(16 << 10)), ("x", Err(AmountError::NotAnAmount))]
    {
        assert_eq!(size_or_none(text).map(|Size(bytes)| bytes), bytes, "{text}");
    }
    assert!(matches!("0".parse::<Size>(), Err(AmountError::Zero)));
}

#[test]
fn a_mistake_is_told_in_one_line() {
    let table = [
        (
            "aquifer",
            "a command is needed: replay, report, plan, bench, stage, top, metrics or doctor",
        ),
        ("aquifer drink", "unrecognized subcommand 'drink'"),
        ("aquifer replay", "the following required arguments were not provided: <TRACE>"),
        (
            "aquifer replay t.csv --bugdet 1",
            "unexpected argument '--bugdet' found; tip: a similar argument exists",
        ),
        (
            "aquifer replay t.csv --budget 0",
            "invalid value '0' for '--budget <BYTES|1.05x>': a budget of zero",
        ),
        (
            "aquifer replay t.csv --device gpu",
            "invalid value 'gpu' for '--device <DEVICE>': a device is",
        ),
        ("aquifer replay t.csv --device cuda:-1", "invalid value 'cuda:-1'"),
        ("aquifer replay t.csv --allocator best", "invalid value 'best' for '--allocator"),
        ("aquifer replay t.csv --streams 0", "invalid value '0' for '--streams <N>'"),
        ("aquifer replay t.csv --repeat 0", "invalid value '0' for '--repeat <N>'"),
        (
            "aquifer replay t.csv --fit --budget 1G",
            "the argument '--fit' cannot be used with '--budget",
        ),
        ("aquifer bench", "'aquifer bench' requires a subcommand but one was not provided"),
        ("aquifer bench sewer", "unrecognized subcommand 'sewer'"),
        (
            "aquifer bench device --device gpu",
            "invalid value 'gpu' for '--device <DEVICE>': a device is",
        ),
        (
            "aquifer bench device --only",
            "a value is required for '--only <PATTERN>' but none was supplied",
        ),
        ("aquifer bench device --fast", "unexpected argument '--fast' found"),
        ("aquifer bench pinned --driver", "unexpected argument '--driver' found"),
        (
            "aquifer replay t.csv --budget 1.0",
            "invalid value '1.0' for '--budget <BYTES|1.05x>': a decimal",
        ),
        (
            "aquifer plan t.csv --check",
            "the following required arguments were not provided: --limit <BYTES|1.05x>",
        ),
        ("aquifer plan t.csv --seconds 0", "invalid value '0' for '--seconds <N>'"),
        ("aquifer plan t.csv --limit 0", "invalid value '0' for '--limit <BYTES|1.05x>'"),
        ("aquifer completions tcsh", "invalid value 'tcsh' for '<SHELL>'"),
        ("aquifer stage", "the following required arguments were not provided: <FILE>"),
        (
            "aquifer stage f --slot 2x",
            "invalid value '2x' for '--slot <BYTES>': an amount is bytes",
        ),
        ("aquifer top --interval 0", "invalid value '0' for '--interval <TIME>': an interval"),
        ("aquifer top --interval 5ms", "invalid value '5ms' for '--interval <TIME>'"),
        ("aquifer top --interval 1e9s", "invalid value '1e9s' for '--interval <TIME>'"),
        (
            "aquifer metrics --listen 9464",
            "invalid value '9464' for '--listen <ADDRESS>': invalid socket address",
        ),
        (
            "aquifer metrics -o f --listen 127.0.0.1:1",
            "the argument '--output <FILE>' cannot be used with '--listen",
        ),
        ("aquifer doctor now", "unexpected argument 'now' found"),
    ];
    for (line, expected) in table {
        let said = mistake(line);
        assert!(said.starts_with(expected), "{line}: {said}");
        assert!(!said.contains('\n'), "{said:?}");
    }
}
