//! Who may use whom: the groups of `stack/src/lib.rs`, and what the connection manager may see of the stack.
//!
//! Owns the reading of paths (`crate::a`, `crate::{a, b::c}`, `super::super::a`) out of code. Never resolves a name.

use std::collections::BTreeMap;

use super::Finding;
use super::rules::CM_HARDWARE;
use super::source::{Source, block_end};

/// The modules of the stack that a connection manager may use: the API, its values, and the wire header it parses.
const CM_MAY_USE: [&str; 7] = ["verbs", "types", "time", "rng", "raw", "table", "wire"];

/// Modules by name with the number of their group.
pub(super) struct Groups(BTreeMap<String, usize>);

impl Groups {
    /// Reads them from the text of `stack/src/lib.rs`: a comment `// 2 resources` opens group 2.
    pub(super) fn parse(lib: &str) -> Self {
        let mut group = None;
        let mut modules = BTreeMap::new();
        for line in lib.lines().map(str::trim) {
            if let Some(comment) = line.strip_prefix("// ") {
                group = comment.split(' ').next().and_then(|n| n.parse().ok()).or(group);
            }
            let module =
                line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ").and_then(|m| m.strip_suffix(';'));
            if let (Some(module), Some(group)) = (module, group) {
                modules.insert(module.to_owned(), group);
            }
        }
        Self(modules)
    }

    /// The group of a module.
    pub(super) fn of(&self, module: &str) -> Option<usize> {
        self.0.get(module).copied()
    }

    /// How many modules have a group.
    pub(super) fn modules(&self) -> usize {
        self.0.len()
    }
}

/// The stack: a module uses only modules of a strictly earlier group.
pub(super) fn earlier_groups(source: &Source, groups: &Groups) -> Vec<Finding> {
    let path = source.module_path();
    let Some(own) = path.first().copied() else { return Vec::new() };
    let Some(group) = groups.of(own) else {
        return vec![source.finding(
            0,
            "layers",
            format!("`{own}` stands in no group of stack/src/lib.rs: add it to one"),
        )];
    };
    let mut out = Vec::new();
    for (at, used) in used_roots(source, "crate::") {
        if used == own || groups.of(&used).is_some_and(|g| g < group) {
            continue;
        }
        let theirs = groups.of(&used).map_or("no group".to_owned(), |g| format!("group {g}"));
        out.push(source.finding(
            at,
            "layers",
            format!("`{own}` (group {group}) uses `crate::{used}` ({theirs}): move what is shared into an earlier group, or the use into a later one"),
        ));
    }
    out.extend(supers_out_of_the_module(source, path.len()));
    out
}

/// Law 10: the connection manager sees only the verbs and their values.
pub(super) fn cm_sees_verbs_only(source: &Source) -> Vec<Finding> {
    let uses = used_roots(source, "uroce::").into_iter();
    let hardware = source.path.starts_with(CM_HARDWARE);
    let may = |used: &str| CM_MAY_USE.contains(&used) || hardware && used == "hw";
    uses.filter(|(at, used)| !source.in_test(*at) && !may(used))
        .map(|(at, used)| {
            let fix = format!(
                "cm uses `uroce::{used}`: it may see {} (an edge or a driver belongs to the caller)",
                CM_MAY_USE.join(", ")
            );
            source.finding(at, "cm-sees-verbs", fix)
        })
        .collect()
}

/// A chain of `super::` as long as the module is deep reaches the crate's root, and so every module.
fn supers_out_of_the_module(source: &Source, depth: usize) -> Vec<Finding> {
    let chain = "super::".repeat(depth);
    let begins = |at: &usize| !source.code.get(..*at).is_some_and(|before| before.ends_with("super::"));
    let found = source.find(&chain).into_iter().filter(|at| begins(at) && !source.in_test(*at));
    found.map(|at| source.finding(at, "layers", format!("`{chain}` is the crate's root: write `crate::`"))).collect()
}

/// The first names behind each `root` (`crate::` or a crate's name) with their places.
fn used_roots(source: &Source, root: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for at in source.find(root) {
        let start = at + root.len();
        let rest = source.code.get(start..).unwrap_or("");
        if rest.starts_with('{') {
            let group = source.code.get(start + 1..block_end(&source.code, start) - 1).unwrap_or("");
            out.extend(first_names(group).into_iter().map(|name| (at, name)));
        } else if let Some(name) = first_names(rest).into_iter().next() {
            out.push((at, name));
        }
    }
    out.retain(|(_, name)| name != "self");
    out
}

/// The first name of each entry of a use list: `a::b, c::{d, e}` gives `a` and `c`.
fn first_names(list: &str) -> Vec<String> {
    let mut depth = 0_i32;
    let entries = list.split(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        c == ',' && depth == 0
    });
    let name = |entry: &str| entry.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    entries.map(name).filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str =
        "// 0 values\npub mod types;\n\n// 1 vocabulary\npub mod wire;\nmod verbs;\n// 2 resources\npub mod mem;\n";

    fn check(path: &str, text: &str) -> usize {
        earlier_groups(&Source::new(path, text), &Groups::parse(LIB)).len()
    }

    #[test]
    fn groups_are_read_from_the_comments() {
        let groups = Groups::parse(LIB);
        assert_eq!([groups.of("types"), groups.of("verbs"), groups.of("mem")], [Some(0), Some(1), Some(2)]);
        assert_eq!(groups.of("qp"), None);
    }

    #[test]
    fn only_earlier_groups_may_be_used() {
        assert_eq!(check("stack/src/mem/mod.rs", "use crate::types::Psn;\nuse crate::mem::raw;\n"), 0);
        assert_eq!(check("stack/src/wire/mod.rs", "use crate::verbs::Wr;\n"), 1, "the same group");
        assert_eq!(
            check("stack/src/wire/mod.rs", "use crate::{types::{Psn, Qpn}, mem::Mr};\n"),
            1,
            "a later group in a list"
        );
        assert_eq!(check("stack/src/types.rs", "fn f() { crate::mem::g() }\n"), 1, "a path in code");
        assert_eq!(check("stack/src/types.rs", "// crate::mem\nconst A: &str = \"crate::mem\";\n"), 0);
        assert_eq!(check("stack/src/qp.rs", ""), 1, "no group at all");
    }

    #[test]
    fn super_does_not_lead_around_the_rule() {
        assert_eq!(check("stack/src/wire/aeth.rs", "use super::Packet;\n"), 0);
        assert_eq!(check("stack/src/wire/aeth.rs", "use super::super::mem::Mr;\n"), 1);
        assert_eq!(check("stack/src/wire.rs", "use super::mem::Mr;\n"), 1);
    }

    #[test]
    fn the_connection_manager_sees_verbs() {
        let check = |path, text| cm_sees_verbs_only(&Source::new(path, text)).len();
        assert_eq!(check("cm/src/agent.rs", "use uroce::{types::Qpn, verbs::Verbs};\n"), 0);
        assert_eq!(check("cm/src/agent.rs", "use uroce::endpoint::Endpoint;\n"), 1);
        assert_eq!(check("cm/tests/agent.rs", "use uroce::endpoint::Endpoint;\n"), 0);
        assert_eq!(check("cm/src/agent.rs", "#[cfg(test)]\nmod tests {\n use uroce::sim::World;\n}\n"), 0);
    }
}
