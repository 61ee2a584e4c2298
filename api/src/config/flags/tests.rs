use proptest::prelude::*;

use super::*;
use crate::config::{
    DeviceConfig, DiskConfig, DiskIo, DiskSource, LogConfig, MemoryConfig, OutputConfig, PcieConfig, VsockConfig,
};

fn keys(text: &str) -> Result<Vec<Pair>, FlagProblem> {
    split(text, "first")
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

#[test]
fn pairs_are_split_at_commas() {
    let pairs = keys("a=1,b_c=2=3,d-e=\"x,\"\"y\"\"\",f=[1,\"2,3\",],g=[]").unwrap();
    let list = Value::List(vec!["1".to_owned(), "2,3".to_owned()]);
    let expected =
        [("a", text("1")), ("b-c", text("2=3")), ("d-e", text("x,\"y\"")), ("f", list), ("g", Value::List(Vec::new()))];
    assert_eq!(pairs, expected.map(|(key, value)| (key.to_owned(), value)));
}

#[test]
fn the_first_key_may_be_left_out_and_no_other() {
    assert_eq!(keys("x,a=1").unwrap()[0], ("first".to_owned(), text("x")));
    assert_eq!(keys("\"x,y\"").unwrap()[0], ("first".to_owned(), text("x,y")));
    assert_eq!(keys("a=1,x"), Err(FlagProblem::NoValue { key: "x".to_owned() }));
}

#[test]
fn broken_forms_are_named() {
    for (text, part) in [
        ("", "such as `first=...`"),
        ("a=1,", "a comma has nothing"),
        (",a=1", "a comma has nothing"),
        ("a=1,,b=2", "a comma has nothing"),
        ("a=", "`a` has no value"),
        ("a=,b=1", "`a` has no value"),
        ("=1", "no key in front of `=1`"),
        ("a=\"1", "`a` has no closing `\"`"),
        ("a=[1", "`a` has no closing `]`"),
        ("a=[1,", "`a` has no closing `]`"),
        ("a=\"1\"2", "`2` follows the end of the value of `a`"),
        ("a=[1]2", "`2` follows the end of the value of `a`"),
        ("a=1,a=1", "`a` is given twice"),
        ("a-b=1,a_b=1", "`a-b` is given twice"),
        ("x,first=y", "`first` is given twice"),
    ] {
        let error = keys(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn errors_name_the_flag_the_key_the_known_keys_and_the_nearest() {
    let error = |text: &str| text.parse::<MemoryConfig>().unwrap_err().to_string();
    assert_eq!(
        error("size=1G,sahred=on"),
        "--memory: key `sahred` is unknown; did you mean `shared`? Known: size, hotplug, hotplug-method, shared, file, hugepages, \
         hugepage-size, prefault, \
         prefault-threads"
    );
    assert_eq!(
        error("1G,colour=red"),
        "--memory: key `colour` is unknown; known: size, hotplug, hotplug-method, shared, file, hugepages, hugepage-size, prefault, prefault-threads"
    );
    let missing = "socket=/s".parse::<VsockConfig>().unwrap_err().to_string();
    assert_eq!(missing, "--vsock: key `cid` is missing; add `cid=...`");
    assert_eq!(error("1G,shared=maybe"), "--memory: key `shared`: `maybe` is neither on nor off");
    assert_eq!(error("1G,shared=[on]"), "--memory: key `shared`: a list was given where on or off is wanted");
    assert!(error("1X").starts_with("--memory: key `size`: `1X` is no size"), "{}", error("1X"));
    assert_eq!(
        error("1G,prefault=on,prefault_threads=65536"),
        "--memory: key `prefault-threads`: `65536` is no whole number from 0 to 65535"
    );
}

#[test]
fn a_near_miss_is_guessed_and_a_far_one_is_not() {
    let known = ["path", "clique", "clique-any-vendor"];
    assert_eq!(nearest("cliqe", &known), Some("clique"));
    assert_eq!(nearest("pth", &known), Some("path"));
    assert_eq!(nearest("zzzz", &known), None);
    assert_eq!(nearest("", &known), None);
    assert_eq!(nearest("x", &[]), None);
}

/// Reads `text` as every flag there is.
fn read_as_everything(text: &str) {
    let _ = text.parse::<MemoryConfig>();
    let _ = text.parse::<DeviceConfig>();
    let _ = text.parse::<DiskConfig>();
    let _ = text.parse::<OutputConfig>();
    let _ = text.parse::<PcieConfig>();
    let _ = text.parse::<LogConfig>();
}

const WORDS: &str =
    "size|path|stub|bar0|bars|clique|file|hugepages|topology|=|=|,|,|\"|\\[|\\]|on|off|1G|2M|host|0x|:|mem64|é|_|-";

proptest! {
    #[test]
    fn any_text_gives_an_answer(text in ".*") {
        read_as_everything(&text);
    }

    #[test]
    fn any_order_of_the_words_of_the_form_gives_an_answer(words in proptest::collection::vec(WORDS, 0..24)) {
        read_as_everything(&words.concat());
    }

    #[test]
    fn any_value_can_be_printed_and_read_back(path in "[^\\x00]+", readonly: bool, id in proptest::option::of("[^\\x00]*")) {
        let disk = DiskConfig { source: DiskSource::Image(path.into()), id, readonly, serial: None, io: DiskIo::default() };
        prop_assert_eq!(disk.to_string().parse(), Ok(disk));
    }
}
