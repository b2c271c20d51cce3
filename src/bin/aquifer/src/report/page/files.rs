//! The page's files, in the order in which they are put together.
//!
//! [`TEMPLATE`] holds three markers. `/*STYLE*/` is replaced by [`STYLE`], `/*SCRIPT*/` by
//! [`SCRIPT`], and `<!--DATA-->`, which stands in the element for the data already, by base64 text.
//! The tests of the page read the order from here.
//!
//! | file in `script` | what it does |
//! |---|---|
//! | `payload.js` | opens the data and checks it |
//! | `words.js`, `elements.js` | figures as text; elements and tables that sort |
//! | `state.js` | what the parts share: the view, the cursor, the instant, the selected block |
//! | `groups.js` | groupings of blocks, their colours and patterns |
//! | `sample.js`, `raster.js`, `find.js` | curves for the columns of the screen; blocks as pixels; blocks at a place |
//! | `bands.js` | merged blocks: the cells of a page, their pixels, a cell at a place |
//! | `gestures.js`, `keys.js`, `glyphs.js` | wheel, fingers and clicks; the keyboard; shapes of markers |
//! | `curves.js`, `map.js`, `block.js` | bytes over time; addresses over time; the selected block |
//! | `instant.js`, `treemap.js` | what lives at an instant |
//! | `summary.js`, `comparison.js`, `markers.js` | the head, where the memory was; two runs; failures and events |
//! | `main.js` | begins, and says what goes wrong |

/// The markup, with the markers.
pub(crate) const TEMPLATE: &str = include_str!("page.html");

/// The styles.
pub(crate) const STYLE: &str =
    concat!(include_str!("vendor/uplot-1.6.32.min.css"), "\n", include_str!("page.css"));

/// The script: one module. The files share its scope.
pub(crate) const SCRIPT: &str = concat!(
    include_str!("vendor/uplot-1.6.32.min.js"),
    "\n",
    include_str!("script/payload.js"),
    include_str!("script/words.js"),
    include_str!("script/elements.js"),
    include_str!("script/state.js"),
    include_str!("script/groups.js"),
    include_str!("script/sample.js"),
    include_str!("script/raster.js"),
    include_str!("script/find.js"),
    include_str!("script/bands.js"),
    include_str!("script/gestures.js"),
    include_str!("script/glyphs.js"),
    include_str!("script/curves.js"),
    include_str!("script/map.js"),
    include_str!("script/block.js"),
    include_str!("script/treemap.js"),
    include_str!("script/instant.js"),
    include_str!("script/summary.js"),
    include_str!("script/comparison.js"),
    include_str!("script/markers.js"),
    include_str!("script/keys.js"),
    include_str!("script/main.js"),
);
