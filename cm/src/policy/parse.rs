//! A policy as a text: TOML, read by hand so that every message names the field and what to write instead.
//!
//! Owns the grammar. Never opens a file.
//!
//! ```
//! # fn main() -> Result<(), uroce_cm::policy::PolicyError> {
//! let policy = uroce_cm::policy::PolicyConfig::from_toml(
//!     r#"
//!     default = "reject"
//!
//!     [[rule]]
//!     name = "storage network"
//!     action = "allow"
//!     from = ["10.77.0.0/16", "fd77::/32"]
//!     service = ["tcp:7174", "tcp:20000-20999"]
//!
//!     [limits]
//!     source_rate = 10
//!     "#,
//! )?;
//! assert_eq!((policy.rules.rules.len(), policy.source.per_second), (1, 10));
//! # Ok(())
//! # }
//! ```

use core::ops::RangeInclusive;
use core::str::FromStr;

use toml::{Table, Value};

use super::rate::SOURCES_RANGE;
use super::rules::{MATCHES_MAX, MatchError, NAME_MAX, RULES_MAX, Rule};
use super::{HALF_OPEN_BYTES, PolicyConfig, TIMEWAIT_BYTES};

/// Bytes of a policy at most.
const TEXT_MAX: usize = 1 << 20;

/// A policy that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// The text is no TOML.
    #[error("line {line}: {problem}")]
    Syntax {
        /// The line, from 1.
        line: usize,
        /// What TOML says.
        problem: String,
    },
    /// A field is wrong.
    #[error("{field}: {wrong}")]
    Field {
        /// Where, as a path: `rule "lab".from[0]`.
        field: String,
        /// What is wrong, and what to write.
        wrong: MatchError,
    },
}

fn field(path: impl Into<String>, problem: impl Into<String>, fix: impl Into<String>) -> PolicyError {
    PolicyError::Field { field: path.into(), wrong: MatchError { problem: problem.into(), fix: fix.into() } }
}

impl PolicyConfig {
    /// Reads a policy. What it does not mention is as in [`PolicyConfig::default`].
    ///
    /// # Errors
    /// [`PolicyError`]: the line, or the field with what to write instead.
    pub fn from_toml(text: &str) -> Result<Self, PolicyError> {
        if text.len() > TEXT_MAX {
            let problem = format!("{} bytes are too many", text.len());
            return Err(field("policy", problem, format!("write at most {TEXT_MAX} bytes")));
        }
        let table: Table = text.parse().map_err(|e: toml::de::Error| {
            let before = e.span().and_then(|span| text.get(..span.start)).unwrap_or("");
            let problem = e.message().replace('\n', "; ");
            PolicyError::Syntax { line: before.matches('\n').count() + 1, problem }
        })?;
        known(&table, "", &["default", "rule", "limits", "audit"])?;
        let mut config = Self::default();
        if let Some(value) = table.get("default") {
            config.rules.default = word(value, "default")?;
        }
        if let Some(value) = table.get("rule") {
            config.rules.rules = rules(value)?;
        }
        if let Some(value) = table.get("limits") {
            limits(section(value, "limits")?, &mut config)?;
        }
        if let Some(value) = table.get("audit") {
            let table = section(value, "audit")?;
            known(table, "audit", &["rate", "burst"])?;
            number(table, ("audit", "rate"), 1..=1_000_000, &mut config.audit.per_second)?;
            number(table, ("audit", "burst"), 1..=1_000_000, &mut config.audit.burst)?;
        }
        Ok(config)
    }
}

fn limits(table: &Table, config: &mut PolicyConfig) -> Result<(), PolicyError> {
    const RATES: RangeInclusive<u32> = 1..=10_000_000;
    let PolicyConfig { source, total, bad_source, bad_total, sources, limits, .. } = config;
    let least = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
    let fields: [(&str, RangeInclusive<u32>, &mut u32); 14] = [
        ("source_rate", RATES, &mut source.per_second),
        ("source_burst", RATES, &mut source.burst),
        ("total_rate", RATES, &mut total.per_second),
        ("total_burst", RATES, &mut total.burst),
        ("bad_source_rate", RATES, &mut bad_source.per_second),
        ("bad_source_burst", RATES, &mut bad_source.burst),
        ("bad_total_rate", RATES, &mut bad_total.per_second),
        ("bad_total_burst", RATES, &mut bad_total.burst),
        ("sources", SOURCES_RANGE, sources),
        ("half_open", 1..=65_536, &mut limits.half_open),
        ("half_open_bytes", least(HALF_OPEN_BYTES)..=1 << 30, &mut limits.half_open_bytes),
        ("timewait", 1..=1_048_576, &mut limits.timewait),
        ("timewait_bytes", least(TIMEWAIT_BYTES)..=1 << 30, &mut limits.timewait_bytes),
        ("backlog", 1..=65_536, &mut limits.backlog),
    ];
    let names: Vec<&str> = fields.iter().map(|(name, ..)| *name).collect();
    known(table, "limits", &names)?;
    for (name, range, to) in fields {
        number(table, ("limits", name), range, to)?;
    }
    Ok(())
}

fn rules(value: &Value) -> Result<Vec<Rule>, PolicyError> {
    let list = value.as_array().ok_or_else(|| {
        field("rule", format!("is {} and must be a list of tables", what(value)), "write `[[rule]]` before each rule")
    })?;
    if list.len() > RULES_MAX {
        return Err(field("rule", format!("{} rules are too many", list.len()), format!("keep {RULES_MAX} of them")));
    }
    let mut rules: Vec<Rule> = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let rule = rule(index + 1, value)?;
        if rules.iter().any(|other| other.name == rule.name) {
            let problem = format!("an earlier rule is called \"{}\" too", rule.name);
            return Err(field(format!("rule {}.name", index + 1), problem, "give each rule a name of its own"));
        }
        rules.push(rule);
    }
    Ok(rules)
}

fn rule(number: usize, value: &Value) -> Result<Rule, PolicyError> {
    let path = format!("rule {number}");
    let table = section(value, &path)?;
    known(table, &path, &["name", "action", "from", "service"])?;
    let missing = |name: &str, fix: &str| field(format!("{path}.{name}"), "is missing", fix);
    let name = table.get("name").ok_or_else(|| missing("name", "write name = \"…\": the audit log calls it so"))?;
    let name = string(name, &format!("{path}.name"))?;
    if name.is_empty() || name.chars().count() > NAME_MAX || name.chars().any(char::is_control) {
        let fix = format!("write 1 to {NAME_MAX} printable characters");
        return Err(field(format!("{path}.name"), "is no name", fix));
    }
    let path = format!("rule {number} (\"{name}\")");
    let action = table.get("action").ok_or_else(|| {
        field(format!("{path}.action"), "is missing", "write action = \"allow\", \"reject\" or \"drop\"")
    })?;
    Ok(Rule {
        name: name.to_owned(),
        action: word(action, &format!("{path}.action"))?,
        from: words(table, &path, "from")?,
        service: words(table, &path, "service")?,
    })
}

/// A list of words, or one word. Absent is empty; an empty list would match everything and is refused.
fn words<T: FromStr<Err = MatchError>>(table: &Table, path: &str, name: &str) -> Result<Vec<T>, PolicyError> {
    let Some(value) = table.get(name) else { return Ok(Vec::new()) };
    let path = format!("{path}.{name}");
    let Some(list) = value.as_array() else { return Ok(vec![word(value, &path)?]) };
    if list.is_empty() || list.len() > MATCHES_MAX {
        let problem = format!("has {} entries", list.len());
        return Err(field(path, problem, format!("write 1 to {MATCHES_MAX}, or leave `{name}` out: all fit then")));
    }
    list.iter().enumerate().map(|(i, value)| word(value, &format!("{path}[{i}]"))).collect()
}

fn word<T: FromStr<Err = MatchError>>(value: &Value, path: &str) -> Result<T, PolicyError> {
    string(value, path)?.parse().map_err(|wrong| PolicyError::Field { field: path.to_owned(), wrong })
}

fn string<'a>(value: &'a Value, path: &str) -> Result<&'a str, PolicyError> {
    let problem = || field(path, format!("is {} and must be a string", what(value)), "write it in double quotes");
    value.as_str().ok_or_else(problem)
}

fn section<'a>(value: &'a Value, path: &str) -> Result<&'a Table, PolicyError> {
    let name = path.split(' ').next().unwrap_or(path);
    let brackets = if name == "rule" { format!("[[{name}]]") } else { format!("[{name}]") };
    let problem = || field(path, format!("is {} and must be a table", what(value)), format!("write `{brackets}`"));
    value.as_table().ok_or_else(problem)
}

fn number(
    table: &Table,
    (path, name): (&str, &str),
    range: RangeInclusive<u32>,
    to: &mut u32,
) -> Result<(), PolicyError> {
    let Some(value) = table.get(name) else { return Ok(()) };
    let found = value.as_integer().and_then(|v| u32::try_from(v).ok()).filter(|v| range.contains(v));
    *to = found.ok_or_else(|| {
        let problem = value.as_integer().map_or_else(|| format!("is {}", what(value)), |v| format!("is {v}"));
        let fix = format!("write a whole number from {} to {}", range.start(), range.end());
        field(format!("{path}.{name}"), problem, fix)
    })?;
    Ok(())
}

/// A misspelt field must not pass for one that is absent.
fn known(table: &Table, path: &str, names: &[&str]) -> Result<(), PolicyError> {
    match table.keys().find(|key| !names.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            Err(field(at, "is no field", format!("write one of {}", names.join(", "))))
        }
    }
}

fn what(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a number",
        Value::Float(_) => "a fraction",
        Value::Boolean(_) => "a truth value",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Action;

    fn said(text: &str) -> String {
        PolicyConfig::from_toml(text).unwrap_err().to_string()
    }

    #[test]
    fn an_empty_policy_is_the_default() {
        assert_eq!(PolicyConfig::from_toml(""), Ok(PolicyConfig::default()));
        let d = PolicyConfig::default();
        assert_eq!((d.source.per_second, d.source.burst, d.total.per_second), (100, 200, 5000));
    }

    #[test]
    fn everything_can_be_said() {
        let text = r#"
            default = "drop"
            [[rule]]
            name = "lab"
            action = "allow"
            from = ["10.0.0.0/8", "fd00::/8"]
            service = "tcp:7174"
            [[rule]]
            name = "rest"
            action = "reject"
            [limits]
            source_rate = 1
            source_burst = 2
            total_rate = 3
            total_burst = 4
            bad_source_rate = 5
            bad_source_burst = 6
            bad_total_rate = 7
            bad_total_burst = 8
            sources = 64
            half_open = 9
            half_open_bytes = 1000000
            timewait = 10
            timewait_bytes = 2000000
            backlog = 11
            [audit]
            rate = 12
            burst = 13
        "#;
        let p = PolicyConfig::from_toml(text).unwrap();
        assert_eq!(p.rules.default, Action::Drop);
        assert_eq!(
            p.rules.rules.iter().map(|r| (r.name.as_str(), r.from.len(), r.service.len())).collect::<Vec<_>>(),
            [("lab", 2, 1), ("rest", 0, 0)]
        );
        assert_eq!((p.source.per_second, p.source.burst, p.total.per_second, p.total.burst), (1, 2, 3, 4));
        assert_eq!((p.bad_source.per_second, p.bad_source.burst), (5, 6));
        assert_eq!((p.bad_total.per_second, p.bad_total.burst, p.sources), (7, 8, 64));
        assert_eq!((p.limits.half_open_records(), p.limits.timewait_records(), p.limits.backlog), (9, 10, 11));
        assert_eq!((p.audit.per_second, p.audit.burst), (12, 13));
    }

    #[test]
    fn every_message_names_the_field_and_the_fix() {
        let cases = [
            ("default = \"maybe\"", "default: `maybe` is no action; write \"allow\", \"reject\" or \"drop\""),
            ("default = 1", "default: is a number and must be a string; write it in double quotes"),
            ("defalt = \"drop\"", "defalt: is no field; write one of default, rule, limits, audit"),
            ("limits = 1", "limits: is a number and must be a table; write `[limits]`"),
            ("rule = 1", "rule: is a number and must be a list of tables; write `[[rule]]` before each rule"),
            ("rule = [1]", "rule 1: is a number and must be a table; write `[[rule]]`"),
            ("[limits]\nsource_rate = 0", "limits.source_rate: is 0; write a whole number from 1 to 10000000"),
            ("[limits]\nbacklog = 1.5", "limits.backlog: is a fraction; write a whole number from 1 to 65536"),
            ("[audit]\nrat = 1", "audit.rat: is no field; write one of rate, burst"),
            ("[[rule]]\naction = \"allow\"", "rule 1.name: is missing; write name = \"…\": the audit log calls it so"),
            (
                "[[rule]]\nname = \"a\"",
                "rule 1 (\"a\").action: is missing; write action = \"allow\", \"reject\" or \"drop\"",
            ),
            (
                "[[rule]]\nname = \"\"\naction = \"allow\"",
                "rule 1.name: is no name; write 1 to 64 printable characters",
            ),
            (
                "[[rule]]\nname = \"a\"\naction = \"allow\"\nfrom = []",
                "rule 1 (\"a\").from: has 0 entries; write 1 to 256, or leave `from` out: all fit then",
            ),
            (
                "[[rule]]\nname = \"a\"\naction = \"allow\"\nfrom = [\"::/0\", \"10.0.0.1/8\"]",
                "rule 1 (\"a\").from[1]: `10.0.0.1/8` has bits set beyond its 8 bits; write \"10.0.0.0/8\" for the \
                 network, or \"10.0.0.1\" for the one address",
            ),
            (
                "[[rule]]\nname = \"a\"\naction = \"drop\"\n[[rule]]\nname = \"a\"\naction = \"drop\"",
                "rule 2.name: an earlier rule is called \"a\" too; give each rule a name of its own",
            ),
        ];
        for (text, want) in cases {
            assert_eq!(said(text), want, "{text}");
        }
        let service = said("[[rule]]\nname = \"a\"\naction = \"drop\"\nservice = [\"tcp:x\"]");
        assert!(service.starts_with("rule 1 (\"a\").service[0]: `tcp:x` names no service; write a port"), "{service}");
        let syntax = said("default = \"drop\"\n\n[[rule]\n");
        assert!(syntax.starts_with("line 3: ") && !syntax.contains('\n'), "{syntax}");
        assert!(said("default = \"drop\"\ndefault = \"drop\"").starts_with("line 2: "));
    }
}
