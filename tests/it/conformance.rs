//! The registry of requirements: every test that it names exists, and the book's page says the same.
//!
//! `UROCE_WRITE_DOCS=1` writes the page anew.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Registry {
    requirement: Vec<Requirement>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    id: String,
    source: String,
    says: String,
    tests: Vec<String>,
    differs: Option<String>,
}

const HEAD: &str = "# Conformance

What a RoCEv2 endpoint has to do, in our words, and the tests that hold us to it. The numbers are ours: the specification's
text is licensed and not repeated. \"Linux\" as a source means that rxe or its connection manager does so and that a peer
has to live with it. The list is `docs/conformance.toml`; a test keeps the two equal and checks that every test named
exists.

| id | source | requirement | tests |
|---|---|---|---|
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn registry() -> Vec<Requirement> {
    let text = std::fs::read_to_string(root().join("docs/conformance.toml")).unwrap();
    toml::from_str::<Registry>(&text).unwrap().requirement
}

/// Whether `file` has a test function of this name.
fn has_test(file: &str, name: &str) -> bool {
    let Ok(text) = std::fs::read_to_string(root().join(file)) else { return false };
    let wanted = format!("fn {name}(");
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        // Attributes may stand between the two.
        if line == "#[test]" && lines.by_ref().find(|l| !l.starts_with("#[")).is_some_and(|l| l.starts_with(&wanted)) {
            return true;
        }
    }
    false
}

fn page(all: &[Requirement]) -> String {
    let mut out = HEAD.to_owned();
    for r in all {
        let tests: Vec<String> = r.tests.iter().map(|t| format!("`{}`", t.replace("::", "` `"))).collect();
        let says = r.differs.as_ref().map_or_else(|| r.says.clone(), |d| format!("{} *{d}*", r.says));
        writeln!(out, "| {} | {} | {says} | {} |", r.id, r.source, tests.join(", ")).unwrap();
    }
    out
}

#[test]
fn every_requirement_has_tests_and_they_exist() {
    let all = registry();
    let mut ids = BTreeSet::new();
    let mut missing = Vec::new();
    for r in &all {
        assert!(ids.insert(&r.id), "{} stands twice", r.id);
        assert!(!r.tests.is_empty() && !r.says.is_empty() && !r.source.is_empty(), "{} is incomplete", r.id);
        for test in &r.tests {
            let found = test.split_once("::").is_some_and(|(file, name)| has_test(file, name));
            if !found {
                missing.push(format!("{}: {test}", r.id));
            }
        }
    }
    assert!(missing.is_empty(), "docs/conformance.toml names tests that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn the_page_is_the_registry() {
    let path = root().join("docs/src/conformance.md");
    let want = page(&registry());
    if std::env::var_os("UROCE_WRITE_DOCS").is_some() {
        std::fs::write(&path, &want).unwrap();
    }
    let have = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        have == want,
        "docs/src/conformance.md differs from docs/conformance.toml: UROCE_WRITE_DOCS=1 cargo test -p uroce-tests --test it conformance"
    );
}

#[test]
fn a_test_that_is_not_there_is_found_out() {
    assert!(has_test("tests/it/conformance.rs", "the_page_is_the_registry"));
    assert!(!has_test("tests/it/conformance.rs", "registry"), "a function that is no test");
    assert!(!has_test("tests/it/conformance.rs", "nobody_wrote_this"));
    assert!(!has_test("tests/it/nowhere.rs", "the_page_is_the_registry"));
}
