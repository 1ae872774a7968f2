//! The house rules (CONTRIBUTING.md) as tests: layers, sizes, `unsafe`, panics, clocks, marks of unfinished work, links.
//!
//! Owns the walk over the workspace and the report; `layers`, `rules` and `book` hold the rules, `source` the lexer. A message
//! names file, line, rule and fix.

mod book;
mod layers;
mod rules;
mod source;

use std::fmt;
use std::path::{Path, PathBuf};

use layers::Groups;
use source::Source;

/// The crates of the workspace with the crates of it that each may use (tests and benches of a crate may use more).
const CRATES: [(&str, &[&str]); 6] = [
    ("pcap-fixtures", &[]),
    ("stack", &[]),
    ("cm", &["uroce"]),
    ("tools", &["uroce", "uroce-cm", "uroce-fixtures"]),
    ("tests", &["uroce", "uroce-cm", "uroce-fixtures"]),
    ("benches", &["uroce", "uroce-cm", "uroce-fixtures"]),
];

/// A broken rule.
struct Finding {
    path: String,
    line: usize,
    rule: &'static str,
    fix: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: [{}] {}", self.path, self.line, self.rule, self.fix)
    }
}

impl Source {
    fn finding(&self, offset: usize, rule: &'static str, fix: String) -> Finding {
        Finding { path: self.path.clone(), line: self.line(offset), rule, fix }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// All files below `folder`, without what is built or belongs to git.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let skipped = path.file_name().is_some_and(|name| name == "target" || name == ".git");
        if skipped || path.is_symlink() {
            continue;
        }
        if path.is_dir() { out.extend(files(&path)) } else { out.push(path) }
    }
    out.sort();
    out
}

/// All files of the workspace that are text, by their path from its root.
fn texts() -> Vec<(String, String)> {
    let root = root();
    let named = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str()?.replace('\\', "/");
        Some((name, String::from_utf8(std::fs::read(&path).ok()?).ok()?))
    };
    files(&root).into_iter().filter_map(named).collect()
}

/// The Rust files, with those marked that a `#[cfg(test)] mod name;` makes part of the tests.
fn sources() -> Vec<Source> {
    let rust = |(path, text): &(String, String)| path.ends_with(".rs").then(|| Source::new(path, text));
    let mut sources: Vec<Source> = texts().iter().filter_map(rust).collect();
    let mut test_stems = Vec::new();
    for source in &sources {
        let stem = source.path.trim_end_matches(".rs");
        let folder = match stem.rsplit_once('/') {
            Some((folder, "mod" | "lib" | "main")) => folder,
            _ => stem,
        };
        test_stems.extend(source.test_modules().iter().map(|name| format!("{folder}/{name}")));
    }
    for source in &mut sources {
        let within =
            |stem: &String| source.path.strip_prefix(stem).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'));
        source.is_test |= test_stems.iter().any(within);
    }
    sources
}

fn groups() -> Groups {
    Groups::parse(&std::fs::read_to_string(root().join("stack/src/lib.rs")).unwrap())
}

/// Checks the files that `which` names, and fails with everything that was found.
fn check(which: impl Fn(&Source) -> bool, rule: impl Fn(&Source) -> Vec<Finding>) {
    let sources: Vec<Source> = sources().into_iter().filter(which).collect();
    assert!(!sources.is_empty(), "no file to check: has the workspace moved?");
    report(sources.iter().flat_map(rule).collect());
}

fn report(findings: Vec<Finding>) {
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(lines.is_empty(), "{} broken house rules:\n{}\n", lines.len(), lines.join("\n"));
}

fn below<'a>(folders: &'a [&'a str]) -> impl Fn(&Source) -> bool + 'a {
    move |source| folders.iter().any(|folder| source.path.starts_with(folder))
}

#[test]
fn modules_use_only_earlier_groups() {
    let groups = groups();
    assert!(groups.modules() > 8, "the groups of stack/src/lib.rs cannot be read");
    check(below(&["stack/src/"]), |source| layers::earlier_groups(source, &groups));
}

#[test]
fn cm_sees_only_the_verbs() {
    check(below(&["cm/src/"]), layers::cm_sees_verbs_only);
}

#[test]
fn crates_use_only_what_they_may() {
    let mut findings = Vec::new();
    for (name, may) in CRATES {
        let path = format!("{name}/Cargo.toml");
        let manifest = std::fs::read_to_string(root().join(&path)).unwrap();
        findings.extend(crate_dependencies(&path, &manifest, may));
    }
    report(findings);
}

fn crate_dependencies(path: &str, manifest: &str, may: &[&str]) -> Vec<Finding> {
    let mut section = "";
    let mut out = Vec::new();
    for (number, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            section = line;
        }
        let name = line.split(['.', ' ', '=']).next().unwrap_or("");
        if section == "[dependencies]" && name.starts_with("uroce") && !may.contains(&name) {
            let fix = format!("may not depend on {name} (ARCHITECTURE.md, crates)");
            out.push(Finding { path: path.to_owned(), line: number + 1, rule: "crates", fix });
        }
    }
    out
}

#[test]
fn files_and_functions_are_short() {
    check(|_| true, |source| [rules::file_size(source), rules::function_size(source)].into_iter().flatten().collect());
}

#[test]
fn unsafe_has_its_place_and_reason() {
    check(|_| true, rules::unsafe_code);
    let blocks: usize = sources().iter().map(rules::count_unsafe).sum();
    println!("unsafe blocks and impls: {blocks}");
}

#[test]
fn nothing_is_half_done() {
    check(|_| true, rules::finished);
}

#[test]
fn every_file_says_what_it_owns() {
    check(|_| true, rules::opens_with_doc);
}

#[test]
fn the_stack_and_cm_do_not_panic() {
    check(below(&["stack/src/", "cm/src/"]), rules::no_panics);
}

#[test]
fn the_stack_counts_its_locks() {
    check(below(&["stack/src/"]), rules::counted_locks);
    let bad = "//! Doc.\nuse std::sync::{Arc, Mutex};\nuse std::sync::MutexGuard;\n";
    assert_eq!(rules::counted_locks(&Source::new("stack/src/bad.rs", bad)).len(), 1);
}

#[test]
fn state_machines_are_sans_io() {
    let groups = groups();
    check(|source| rules::is_sans_io(source, &groups), rules::sans_io);
}

#[test]
fn the_simulator_is_repeatable() {
    check(below(&["stack/src/sim"]), rules::repeatable);
}

#[test]
fn the_code_map_names_files_that_exist() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let paths = named_paths(&map);
    assert!(paths.len() > 40, "ARCHITECTURE.md has lost its code map");
    let gone = paths
        .into_iter()
        .filter(|(_, path)| !root().join(path).exists() && !root().join("stack/src").join(path).exists());
    report(
        gone.map(|(line, path)| Finding {
            path: "ARCHITECTURE.md".to_owned(),
            line,
            rule: "code-map",
            fix: format!("there is no `{path}`: say where it has gone"),
        })
        .collect(),
    );
}

#[test]
fn every_link_leads_somewhere_and_the_book_lists_its_pages() {
    let pages: book::Pages = texts().into_iter().filter(|(path, _)| path.ends_with(".md")).collect();
    assert!(pages.len() > 20, "the book is gone");
    let mut findings = book::broken_links(&pages, |path| root().join(path).exists());
    findings.extend(book::unlisted(&pages));
    report(findings);
}

/// What stands between backquotes and looks like a path, with its line.
fn named_paths(text: &str) -> Vec<(usize, &str)> {
    let path = |word: &&str| word.contains('/') && !word.contains([' ', ':']) || word.ends_with(".rs");
    let mut out = Vec::new();
    for (number, line) in text.lines().enumerate() {
        out.extend(line.split('`').skip(1).step_by(2).filter(path).map(|word| (number + 1, word)));
    }
    out
}

#[test]
fn no_file_names_a_machine() {
    let findings = texts().iter().flat_map(|(path, text)| machine_paths(path, text)).collect();
    report(findings);
}

fn machine_paths(path: &str, text: &str) -> Vec<Finding> {
    let homes = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    let mut out = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for home in homes.iter().filter(|home| starts_a_path(line, home)) {
            let fix = format!("`{home}` exists on one machine: use a path from the workspace or a variable");
            out.push(Finding { path: path.to_owned(), line: number + 1, rule: "machine-path", fix });
        }
    }
    out
}

/// Whether `home` stands in the line as the beginning of an absolute path.
fn starts_a_path(line: &str, home: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '}' | '~');
    line.match_indices(home).any(|(at, _)| !line.get(..at).is_some_and(|before| before.ends_with(inside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_file_line_rule_and_fix() {
        let source = Source::new("stack/src/qp.rs", "//! Owns.\n\nfn f() { todo!() }\n");
        let said = rules::finished(&source).iter().map(Finding::to_string).collect::<String>();
        assert_eq!(said, "stack/src/qp.rs:3: [unfinished] `todo!`: finish it, or leave it out");
    }

    #[test]
    fn machine_paths_are_found() {
        let found = |text: &str| machine_paths("x", text).len();
        assert_eq!(found(concat!("cd /ro", "ot/x\n")), 1);
        assert_eq!(found(concat!("HOME=/ho", "me/me\n")), 1);
        assert_eq!(found(concat!("tests/wo", "rk/x ${HOME}/wo", "rk/\n")), 0, "not the beginning of a path");
        assert_eq!(found("crates/stack/src\n"), 0);
    }

    #[test]
    fn paths_are_read_from_a_document() {
        let found = named_paths("see `qp/ud.rs` and `Qp`\n`raw.rs`, `a::b`, docs/adr\n`device/ethernet/`");
        assert_eq!(found, [(1, "qp/ud.rs"), (2, "raw.rs"), (3, "device/ethernet/")]);
    }

    #[test]
    fn forbidden_crates_are_found() {
        let found = |manifest| crate_dependencies("stack/Cargo.toml", manifest, &[]).len();
        assert_eq!(found("[dependencies]\nuroce-cm.workspace = true\n"), 1);
        assert_eq!(found("[dependencies]\nlibc = \"1\"\n[dev-dependencies]\nuroce-fixtures.workspace = true\n"), 0);
    }
}
