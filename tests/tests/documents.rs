//! The examples in `docs`: every command in a `console` block prints what stands below it.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::path::Path;

use tests::process::LIMIT;
use tests::{Session, in_shell};

/// The commands of a document's `console` blocks, each with what should be printed.
fn examples(document: &str) -> Vec<(String, String)> {
    let mut examples: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in document.lines() {
        match (line.strip_prefix("```"), line.strip_prefix("$ banyan ")) {
            (Some(fence), _) => inside = !inside && fence == "console",
            (None, Some(command)) if inside => examples.push((command.to_owned(), String::new())),
            (None, _) if inside => {
                let (_, output) = examples.last_mut().unwrap();
                output.push_str(line);
                output.push('\n');
            }
            _ => {}
        }
    }
    examples
}

#[test]
fn what_documents_show_is_what_the_program_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut seen = 0;
    for entry in fs::read_dir(root.join("docs")).unwrap() {
        let path = entry.unwrap().path();
        for (command, output) in examples(&fs::read_to_string(&path).unwrap()) {
            // What goes to a file is in the file.
            let (command, output) = match command.split_once(" > ") {
                Some((command, file)) => (command.to_owned(), fs::read_to_string(root.join(file)).unwrap()),
                None => (command, output),
            };
            let script = format!("cd '{}' && exec \"$0\" {command}", root.display());
            let outcome = Session::spawn(in_shell::<&str>(&script, &[]), LIMIT).finish();
            assert_eq!(outcome.stdout, output, "{}: banyan {command}\n{outcome}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 3, "only {seen} examples were found");
}

#[test]
fn examples_are_found_in_console_blocks_alone() {
    let text = "$ banyan a\n```console\n$ banyan b 'c d'\nout\n\n$ banyan e\n```\n```\n$ banyan f\n```\n";
    let found = examples(text);
    assert_eq!(found, [("b 'c d'".to_owned(), "out\n\n".to_owned()), ("e".to_owned(), String::new())]);
}
