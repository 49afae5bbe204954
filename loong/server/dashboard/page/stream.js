// The server's events, for as long as the page is open; asks for the API key if there has to be one.

const key = { get: () => sessionStorage.getItem("api-key"), set: (value) => sessionStorage.setItem("api-key", value) };
const LONGEST_PAUSE_MS = 10_000;

function headers() {
  return key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
}

async function askForKey() {
  const dialog = document.getElementById("key");
  document.getElementById("key-note").textContent = key.get() ? "The one given is not known to it." : "";
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => {
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      resolve();
    };
  });
  key.set(document.getElementById("key-input").value);
  dialog.close();
}

export const engineId = Number(new URLSearchParams(location.search).get("engine") ?? 0); // of several

export async function getJson(path) {
  const response = await fetch(`${path}?engine=${engineId}`, { headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? response.statusText);
  return body;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

/** Calls `onHello` with the first event of each connection, `onTick` with all others, `onLost` between two. */
export async function follow({ onHello, onTick, onLost }) {
  for (let pause = 500; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    try {
      const response = await fetch(`/dashboard/events?engine=${engineId}`, { headers: headers() });
      if (response.status === 401) {
        await askForKey();
        pause = 250;
        continue;
      }
      if (!response.ok) throw new Error(`the server answers ${response.status}`);
      let isFirst = true;
      for await (const event of events(response)) {
        if (isFirst) onHello(event);
        else onTick(event);
        isFirst = false;
        pause = 250;
      }
      onLost("the server has ended the stream");
    } catch (error) {
      onLost(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
