//! One finding.

/// The kind of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// What a program gets.
    Gets,
    /// Why it does not get more. Not a problem.
    Limit,
    /// A problem.
    Warning,
}

/// One finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Finding {
    /// Its kind.
    pub(crate) kind: Kind,
    /// The fact and its consequence.
    pub(crate) says: String,
    /// How to fix it, or none if there is no fix. Only for warnings.
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(super) fn gets(says: impl Into<String>) -> Self {
        Self { kind: Kind::Gets, says: says.into(), fix: None }
    }

    pub(super) fn limit(says: impl Into<String>) -> Self {
        Self { kind: Kind::Limit, says: says.into(), fix: None }
    }

    pub(super) fn mend(says: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: Some(fix.into()) }
    }

    pub(super) fn accept(says: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: None }
    }
}

/// Formats a rate in decimal units, as vendors do.
pub(crate) fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}
