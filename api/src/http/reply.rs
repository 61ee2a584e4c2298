//! Writes replies in the form that every known client reads.
//!
//! The status line ends after the code and one space: a client takes all that follows the version for a number. Header names
//! are spelled `Content-Length`: a client searches for these letters. A 204 has no length. JSON is ASCII: a client decodes it
//! piece by piece and cuts through longer characters.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::ext::ReasonPhrase;
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, SERVER};
use hyper::{Response, StatusCode};
use serde_json::Value;

use super::body::Body;
use crate::dialect::json;
use crate::error::ApiError;
use crate::events::Listener;

/// A reply, before it is written.
#[derive(Debug)]
pub(super) enum Reply {
    /// Done, nothing to say.
    Done,
    /// Done, with a body.
    Json(Value),
    /// The description of the API itself.
    Document(&'static str),
    /// Lines of JSON as events happen, from those that are known already.
    Events(Vec<Value>, Listener),
    /// Not done.
    Error(ApiError),
    /// No such path.
    NoPath(String),
    /// A path that is called with another verb.
    WrongVerb {
        /// The right one.
        allow: &'static str,
        /// What was called.
        path: &'static str,
    },
}

impl Reply {
    /// In HTTP; `close` if no more requests of the connection are read.
    pub(super) fn response(self, close: bool) -> Response<Body> {
        let (status, body, allow) = match self {
            Self::Document(text) => return with_type(Body::whole(Full::new(text.into())), "application/yaml", close),
            Self::Events(first, listener) => return with_type(Body::events(first, listener), "application/x-ndjson", close),
            Self::Done => (204, None, None),
            Self::Json(value) => (200, Some(value), None),
            Self::Error(error) => (error.kind.status(), Some(error.chain.into()), None),
            Self::NoPath(path) => (404, Some(vec![format!("there is no {path}")].into()), None),
            Self::WrongVerb { allow, path } => (405, Some(vec![format!("{path} is called with {allow}")].into()), Some(allow)),
        };
        let body: Option<Value> = body;
        let has_body = body.is_some();
        let bytes = body.map_or_else(Bytes::new, |value| json::ascii(&value).into());
        let mut response = Response::new(Body::whole(Full::new(bytes)));
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response.extensions_mut().insert(ReasonPhrase::from_static(b""));
        let headers = response.headers_mut();
        headers.insert(SERVER, HeaderValue::from_static("Banyan"));
        headers.insert(CONNECTION, HeaderValue::from_static(if close { "close" } else { "keep-alive" }));
        if has_body {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(allow) = allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}

/// The reply to a request whose head could not be read, to the byte; the connection ends with it.
pub(super) fn unread(error: &ApiError) -> Vec<u8> {
    let (status, body) = (error.kind.status(), json::ascii(&error.chain.clone().into()));
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} \r\nServer: Banyan\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    [head.into_bytes(), body].concat()
}

fn with_type(body: Body, content: &'static str, close: bool) -> Response<Body> {
    let mut response = Response::new(body);
    response.extensions_mut().insert(ReasonPhrase::from_static(b""));
    let headers = response.headers_mut();
    headers.insert(SERVER, HeaderValue::from_static("Banyan"));
    headers.insert(CONNECTION, HeaderValue::from_static(if close { "close" } else { "keep-alive" }));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content));
    response
}

impl From<()> for Reply {
    fn from((): ()) -> Self {
        Self::Done
    }
}

impl From<Value> for Reply {
    fn from(value: Value) -> Self {
        Self::Json(value)
    }
}
