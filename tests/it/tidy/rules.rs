//! The rules that one file can be judged by: sizes, `unsafe`, panics, clocks and marks of unfinished work.
//!
//! Owns their limits and their lists of exceptions, each with its reason. Never reads a file.

use super::Finding;
use super::layers::Groups;
use super::source::{Source, item_end, words};

/// Lines of a file before its first test.
pub(super) const FILE_LINES: usize = 800;
/// Lines of a function, from `fn` to its closing brace, comments and blank lines not counted.
pub(super) const FUNCTION_LINES: usize = 70;

/// Where `unsafe` may stand: all that touches shared memory, the system or foreign code.
const UNSAFE_IN: [&str; 6] = [
    "stack/src/raw/",
    "stack/src/device/sys/",
    "stack/src/device/af_xdp/",
    "stack/src/hw/ffi/",
    "cm/src/hw/ffi.rs",
    "pcap-fixtures/src/map.rs",
];
/// Where tests need it: a counting allocator, memory that is shared on purpose.
const UNSAFE_IN_TESTS: [&str; 4] = ["tests/alloc/", "tests/it/", "benches/", "cm/tests/cycles/memory.rs"];

/// Where memory comes from the system: a program calls them before it registers, no state machine does.
const ARENAS: [&str; 2] = ["stack/src/raw/file.rs", "stack/src/raw/huge.rs"];

/// The connection manager's front over librdmacm, which is a library with descriptors.
pub(super) const CM_HARDWARE: &str = "cm/src/hw/";

/// Calls that end the process outside tests: file, code on the line, reason.
const MAY_PANIC: [(&str, &str, &str); 0] = [];

/// What makes two runs of one seed differ.
const NOT_REPEATABLE: [(&str, &str); 8] = [
    ("std::time::Instant", "take `now: time::Instant` as an argument"),
    ("SystemTime", "take the time as an argument"),
    ("getrandom", "take an `Rng`: a driver seeds it"),
    ("RandomState", "key the hash from the seed (`table::NumberMap`)"),
    ("HashMap::new", "key the hash from the seed (`table::NumberMap`), or use a BTreeMap"),
    ("HashMap::default", "key the hash from the seed (`table::NumberMap`), or use a BTreeMap"),
    ("HashSet::new", "use a BTreeSet"),
    ("HashSet::default", "use a BTreeSet"),
];

/// What touches the world outside the process, or starts a thread.
const OUTSIDE_WORLD: [(&str, &str); 5] = [
    ("std::thread", "let a driver own the thread"),
    ("std::net", "use `core::net` for addresses; sockets belong to `device`"),
    ("std::fs", "let the caller read the file"),
    ("std::process", "let the caller decide"),
    ("std::env", "take a configuration value"),
];

/// What a thread may wait for another in.
const LOCKS: [&str; 4] = ["Mutex", "RwLock", "Condvar", "Barrier"];
/// Where the system's own may stand: where they are counted, and in front of hardware, which has its own data path.
const LOCKS_IN: [&str; 2] = ["stack/src/lock.rs", "stack/src/hw/"];

/// Groups of the stack that see the outside world only through arguments.
const SANS_IO_GROUPS: usize = 3;

fn allowed(path: &str, list: &[&str]) -> bool {
    list.iter().any(|entry| path == *entry || (entry.ends_with('/') && path.starts_with(entry)))
}

/// A module says what it owns.
pub(super) fn opens_with_doc(source: &Source) -> Vec<Finding> {
    if source.text.starts_with("//!") {
        return Vec::new();
    }
    vec![source.finding(0, "module-doc", "open the file with `//!`: what it owns and what it never does".to_owned())]
}

/// A file is short enough to be read.
pub(super) fn file_size(source: &Source) -> Vec<Finding> {
    let lines = source.code.split("#[cfg(test)]").next().unwrap_or("").lines().count();
    if source.is_test || lines <= FILE_LINES {
        return Vec::new();
    }
    let fix = format!("{lines} lines before the tests, at most {FILE_LINES}: make a folder of it, one thing a file");
    vec![source.finding(0, "file-size", fix)]
}

/// A function fits on a screen.
pub(super) fn function_size(source: &Source) -> Vec<Finding> {
    let mut out = Vec::new();
    for at in source.find("fn ") {
        let end = item_end(&source.code, at);
        let body = source.code.get(at..end).unwrap_or("");
        let lines = body.lines().filter(|line| !line.trim().is_empty()).count();
        if source.in_test(at) || lines <= FUNCTION_LINES {
            continue;
        }
        let name = body.trim_start_matches("fn ").split(['(', '<']).next().unwrap_or("");
        let fix =
            format!("`{name}` has {lines} lines, at most {FUNCTION_LINES}: let one function decide and others compute");
        out.push(source.finding(at, "function-size", fix));
    }
    out
}

/// What a use of `unsafe` must have above it.
fn unsafe_note(source: &Source, at: usize) -> Option<&'static str> {
    let rest = source.code.get(at..).unwrap_or("").trim_start_matches("unsafe").trim_start();
    if rest.starts_with('{') || rest.starts_with("impl") {
        return Some("SAFETY:");
    }
    // A type such as `unsafe extern "C" fn(u8)` promises nothing; a declaration has a name.
    let named = rest.split_once("fn ").is_some_and(|(before, name)| {
        before.chars().all(|c| c.is_alphanumeric() || c.is_whitespace()) && name.starts_with(char::is_alphabetic)
    });
    (named && !in_unsafe_impl(source, at) || rest.starts_with("trait")).then_some("# Safety")
}

/// Functions of an `unsafe impl` have the contract that their trait states.
fn in_unsafe_impl(source: &Source, at: usize) -> bool {
    source.find("unsafe impl").into_iter().any(|start| start < at && at < item_end(&source.code, start))
}

/// Whether the comments above the statement of `at`, up to a blank line or a finished statement, say `note`.
fn noted_above(source: &Source, at: usize, note: &str) -> bool {
    let line = source.line(at);
    let code: Vec<&str> = source.code.lines().collect();
    let comments: Vec<&str> = source.comments.lines().collect();
    for above in (0..line).rev() {
        let (code, comment) = (code.get(above).map_or("", |l| l.trim()), comments.get(above).map_or("", |l| l.trim()));
        if comment.contains(note) {
            return true;
        }
        let own = above + 1 == line;
        let finished = code.is_empty() && comment.is_empty() || code.ends_with(';') || code.ends_with('}');
        if !own && finished {
            return false;
        }
    }
    false
}

/// `unsafe` stands in few files, each use with its reason.
pub(super) fn unsafe_code(source: &Source) -> Vec<Finding> {
    let mut out = Vec::new();
    let may = allowed(&source.path, &UNSAFE_IN) || source.is_test && allowed(&source.path, &UNSAFE_IN_TESTS);
    for at in source.find("allow(unsafe_code)").into_iter().chain(source.find("unsafe")) {
        if !may {
            let fix = format!("`unsafe` may stand only in {}: call a safe function of these", UNSAFE_IN.join(", "));
            out.push(source.finding(at, "unsafe-place", fix));
        }
        let note = unsafe_note(source, at).filter(|note| !noted_above(source, at, note));
        out.extend(
            note.map(|note| source.finding(at, "unsafe-reason", format!("say above it why it is sound: `{note}` …"))),
        );
    }
    out
}

/// How many blocks and impls are `unsafe`.
pub(super) fn count_unsafe(source: &Source) -> usize {
    source.find("unsafe").into_iter().filter(|at| unsafe_note(source, *at) == Some("SAFETY:")).count()
}

/// Nothing is left half done.
pub(super) fn finished(source: &Source) -> Vec<Finding> {
    let fix = |what: &str| format!("`{what}`: finish it, or leave it out");
    let mut out = Vec::new();
    for what in ["todo!", "unimplemented!", "dbg!", "#[ignore"] {
        out.extend(source.find(what).into_iter().map(|at| source.finding(at, "unfinished", fix(what))));
    }
    for what in [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")] {
        let found = words(&source.comments, what).into_iter();
        out.extend(found.map(|at| source.finding(at, "unfinished", fix(what))));
    }
    out
}

/// The stack and the connection manager end no process: errors are values.
pub(super) fn no_panics(source: &Source) -> Vec<Finding> {
    let mut out = Vec::new();
    for call in [".unwrap()", ".expect(", ".unwrap_err()", "panic!", "unreachable!"] {
        for at in source.find(call) {
            let line = source.text.lines().nth(source.line(at) - 1).unwrap_or("");
            let excused = MAY_PANIC.iter().any(|(path, code, _)| source.path == *path && line.contains(code));
            if !source.in_test(at) && !excused {
                out.push(source.finding(
                    at,
                    "no-panic",
                    format!("`{call}`: return an error, or make the case impossible by type"),
                ));
            }
        }
    }
    out
}

/// Whether the file must be sans-IO.
pub(super) fn is_sans_io(source: &Source, groups: &Groups) -> bool {
    if source.path.starts_with("cm/src/") {
        return !source.path.starts_with(CM_HARDWARE);
    }
    let module = source.module_path().first().copied().unwrap_or("");
    source.path.starts_with("stack/src/")
        && !ARENAS.contains(&source.path.as_str())
        && (module == "endpoint" || groups.of(module).is_some_and(|group| group <= SANS_IO_GROUPS))
}

/// Nothing but drivers and devices looks at the world.
pub(super) fn sans_io(source: &Source) -> Vec<Finding> {
    let mut out = uses_of(source, &OUTSIDE_WORLD, "sans-io");
    out.extend(repeatable(source));
    out
}

/// Locks are those of `lock`, so that a test can count them.
pub(super) fn counted_locks(source: &Source) -> Vec<Finding> {
    let names_lock = |at: usize| {
        let statement = source.code.get(at..).and_then(|rest| rest.split(';').next()).unwrap_or("");
        LOCKS.iter().any(|lock| !words(statement, lock).is_empty())
    };
    let found = source.find("std::sync").into_iter().filter(|at| !source.in_test(*at) && names_lock(*at));
    let found = found.filter(|_| !allowed(&source.path, &LOCKS_IN));
    found.map(|at| source.finding(at, "locks", "use those of `lock`: tests/alloc counts them".to_owned())).collect()
}

/// One seed gives one run: the state machines, and the simulator that drives them.
pub(super) fn repeatable(source: &Source) -> Vec<Finding> {
    uses_of(source, &NOT_REPEATABLE, "repeatable")
}

fn uses_of(source: &Source, list: &[(&str, &str)], rule: &'static str) -> Vec<Finding> {
    let mut out = Vec::new();
    for (what, fix) in list {
        let found = source.find(what).into_iter().filter(|at| !source.in_test(*at));
        out.extend(found.map(|at| source.finding(at, rule, format!("`{what}`: {fix}"))));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Source {
        Source::new("stack/src/qp/mod.rs", text)
    }

    #[test]
    fn long_files_are_found_and_their_tests_do_not_count() {
        let lines = |n| "const A: u8 = 1;\n".repeat(n);
        assert_eq!(file_size(&file(&lines(800))).len(), 0);
        assert_eq!(file_size(&file(&lines(801))).len(), 1);
        assert_eq!(file_size(&file(&format!("{}#[cfg(test)]\n{}", lines(700), lines(700)))).len(), 0);
    }

    #[test]
    fn long_functions_are_found_whatever_their_strings_say() {
        let function = |n| format!("fn f() {{\n{}}}\n", "    let a = \"}\"; // }\n".repeat(n));
        assert_eq!(function_size(&file(&function(68))).len(), 0);
        assert_eq!(function_size(&file(&function(69))).len(), 1);
        assert_eq!(function_size(&file(&format!("#[cfg(test)]\nmod tests {{\n{}}}", function(90)))).len(), 0);
    }

    #[test]
    fn unsafe_needs_its_place_and_its_reason() {
        let found = |path, text| unsafe_code(&Source::new(path, text)).iter().map(|f| f.rule).collect::<Vec<_>>();
        let block = "// SAFETY: checked above,\n// and aligned.\nlet a =\n    unsafe { b() };\n";
        assert_eq!(found("stack/src/raw/mod.rs", block), [""; 0]);
        assert_eq!(found("stack/src/qp/mod.rs", block), ["unsafe-place"]);
        assert_eq!(found("stack/src/raw/mod.rs", "let a = unsafe { b() };\n"), ["unsafe-reason"]);
        assert_eq!(
            found("stack/src/raw/mod.rs", "// SAFETY: of another.\nlet a = 1;\nunsafe { b() };\n"),
            ["unsafe-reason"]
        );
        assert_eq!(found("stack/src/raw/mod.rs", "unsafe impl Send for A {}\n"), ["unsafe-reason"]);
        assert_eq!(
            found("stack/src/raw/mod.rs", "/// # Safety\n/// Valid.\n#[must_use]\npub unsafe fn f() {}\n"),
            [""; 0]
        );
        assert_eq!(found("stack/src/raw/mod.rs", "/// Frees.\npub unsafe fn f() {}\n"), ["unsafe-reason"]);
        let allocator = "// SAFETY: forwards.\nunsafe impl GlobalAlloc for A {\n unsafe fn alloc(&self) {}\n}\n";
        assert_eq!(found("tests/alloc/main.rs", allocator), [""; 0]);
        assert_eq!(found("stack/src/raw/mod.rs", "type F = unsafe extern \"C\" fn(u8);\n"), [""; 0]);
        assert_eq!(found("stack/src/qp/mod.rs", "#![allow(unsafe_code)]\n"), ["unsafe-place"]);
        assert_eq!(found("stack/src/qp/mod.rs", "#![deny(unsafe_code)] // no unsafe here\n"), [""; 0]);
    }

    #[test]
    fn half_done_work_is_found() {
        let found = |text: &str| finished(&file(text)).len();
        assert_eq!(found("fn f() { todo!() }\n"), 1);
        assert_eq!(found("#[ignore = \"slow\"]\n#[test]\nfn f() {}\n"), 1);
        assert_eq!(found(concat!("// TO", "DO: later\n")), 1);
        assert_eq!(found("const A: &str = \"todo!\"; // dbg!\n"), 0);
    }

    #[test]
    fn panics_are_found_outside_tests() {
        assert_eq!(no_panics(&file("fn f() { a.unwrap(); b.expect(\"c\"); panic!() }\n")).len(), 3);
        assert_eq!(no_panics(&file("fn f() { a.unwrap_or(1); debug_assert!(b); }\n")).len(), 0);
        assert_eq!(no_panics(&file("#[cfg(test)]\nmod tests {\n fn f() { a.unwrap() }\n}\n")).len(), 0);
    }

    #[test]
    fn clocks_threads_and_system_randomness_are_found() {
        assert_eq!(sans_io(&file("use std::time::Instant;\nuse std::net::UdpSocket;\n")).len(), 2);
        assert_eq!(repeatable(&file("let a = HashMap::<u8, u8>::new(); let b = HashMap::new();\n")).len(), 1);
        assert_eq!(sans_io(&file("use crate::time::Instant;\nuse core::net::IpAddr;\n")).len(), 0);
        let groups = Groups::parse("// 3 protocol\nmod qp;\n// 4 edges\nmod device;\nmod endpoint;\n");
        let judged = |path| is_sans_io(&Source::new(path, ""), &groups);
        assert!(judged("stack/src/qp/ud.rs") && judged("stack/src/endpoint/mod.rs") && judged("cm/src/agent.rs"));
        assert!(!judged("stack/src/device/udp.rs") && !judged("tools/src/main.rs"));
    }

    #[test]
    fn a_file_says_what_it_owns() {
        assert_eq!(opens_with_doc(&file("//! Owns.\n")).len(), 0);
        assert_eq!(opens_with_doc(&file("use a;\n")).len(), 1);
    }
}
